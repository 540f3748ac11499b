"""Check that code and pages stay within their sizes: `python tests/totals.py`, a part of `make lint`.

Whoever adds something that is worth more raises a number here, and says so.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent

LINES = {"diffeqformer/**/*.py": 18_995, "tests/**/*.py": 13_575}
WORDS = {"docs/**/*.md": 19_040, "README.md": 1_200, "benchmarks/README.md": 900, "CHANGELOG.md": 400}
FIELDS = 80


def number_of_fields() -> int:
    """The fields of a config."""
    sys.path.insert(0, str(ROOT))
    from diffeqformer.config import base_config, fields_of

    return len(fields_of(base_config("", "diffeqformer")))


def main() -> None:
    found = {f"fields of a config, at most {FIELDS}": number_of_fields() - FIELDS}
    for limits, unit, parts in ((LINES, "lines", str.splitlines), (WORDS, "words", str.split)):
        for pattern, most in limits.items():
            total = sum(len(parts(path.read_text(encoding="utf-8"))) for path in ROOT.glob(pattern))
            print(f"{pattern}: {total:,} of at most {most:,} {unit}")
            found[f"{unit} of {pattern}, at most {most:,}"] = total - most
    if above := [f"{what}: {number:,} too many" for what, number in found.items() if number > 0]:
        sys.exit("\n".join(above))


if __name__ == "__main__":
    main()
