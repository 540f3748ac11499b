"""WikiText as prose: cutting its files into articles, and undoing its tokenisation."""

import itertools
import re
from collections.abc import Iterable, Iterator

# Exactly one `=` on each side: ` = Title = `, but neither ` = = Section = = ` nor ` = = = `.
TITLE = re.compile(r"= (?!=)\S(.*\S)?(?<!=) =")


def articles(lines: Iterable[str]) -> Iterator[str]:
    """The articles of a WikiText file, `wiki.train.tokens` or raw, each from its title line to the next one.

    Joined, they give the text again, except for blank lines before the first title. Any other text before the first
    title is an article of its own. A title stands between blank lines; a line that looks like one within a paragraph
    doesn't count.

    Args:
        lines: those of the file, which end with a line feed, so that it needn't fit into memory.
    """
    article, after_blank = [], True
    for line, following in itertools.pairwise(itertools.chain(lines, [""])):
        if after_blank and TITLE.fullmatch(line.strip()) and not following.strip():
            if any(part.strip() for part in article):
                yield "".join(article)
            article = []
        article.append(line)
        after_blank = not line.strip()
    if any(part.strip() for part in article):
        yield "".join(article)


WRITTEN = {"@-@": "-", "@,@": ",", "@.@": "."}  # WikiText's tokens, and what they stand for
LEFT = set(", . ; : ! ? % ) ] } ° ′ ″ ½ ¼ ¾ ” ...".split())  # no space before these,
RIGHT = set("( [ { $ £ € ₤ ¥ “ ‘".split())  # no space after these,
BOTH = {*WRITTEN, "‑", "—", "⁄"}  # and no space on either side of these
LIKE_S = ("s", "z", ">")  # the ends of words of which a lone ' makes a possessive
ENDING = re.compile(r"['’](\w.*)?")  # 's, 't, 'll, and the second part of O 'Neil
CONTRACTION = re.compile(r"(s|t|m|re|ve|ll|d|al)")
# after a year, a dash and a day: the dash of a life, which keeps its spaces
MONTHS = set("January February March April May June July August September October November December".split())


def detokenize(text: str) -> str:
    """Undo WikiText's tokenisation, line by line: `the 1 @,@ 000 dogs ' ( or so )` becomes `the 1,000 dogs' (or so)`.

    Only white space and the `@` of `@-@`, `@,@` and `@.@` change. `<unk>` stays, because the original words are lost.
    Ambiguous tokens get the more common reading. Quotation marks open and close alternately within a line. A lone `'`
    after an s is a possessive unless another one can close it. En dashes lose their spaces only between numbers.
    Slashes lose their spaces except before a capital that follows a small letter, as in verse.
    """
    return "\n".join(_detokenize_line(line.split()) for line in text.split("\n"))


def _detokenize_line(tokens: list[str]) -> str:
    marks = 0  # the `=` at either end of a heading
    while tokens[marks : marks + 1] == ["="] and tokens[-1 - marks] == "=" and 2 * marks + 2 < len(tokens):
        marks += 1
    if marks:
        return f"{'=' * marks} {_detokenize_line(tokens[marks : len(tokens) - marks])} {'=' * marks}"
    line = "".join(" " * space + WRITTEN.get(token, token) for space, token in zip(_spaces(tokens), tokens))
    line = re.sub(r"(?<!\d)(\d{1,2}): (?=\d\d(?!\d))", r"\1:", line)  # 17:45
    line = re.sub(r"°(?=[CF]\b)|(?<=\d)° (?=[CF]\b)", " °", line)  # 25 °C
    line = re.sub(r"(?<=[°′]) (?=\d+[′″])", "", line)  # 4°11′56″
    return re.sub(r"\b([A-Z]) & (?=[A-Z]\b)", r"\1&", line)  # R&B


def _has_partner(tokens: list[str], start: int) -> bool:
    """Whether the `'` at `start` may open a quotation: the next `'` doesn't belong to a possessive."""
    try:
        end = tokens.index("'", start + 1)
    except ValueError:
        return False
    return not (tokens[end - 1].endswith(LIKE_S) and tokens[end + 1 : end + 2] and tokens[end + 1][0].isalnum())


def _spaces(tokens: list[str]) -> list[bool]:
    """For each token, whether a space precedes it."""
    spaces, glued, quoted, single = [], True, False, False
    for i, token in enumerate(tokens):
        before, after = tokens[i - 1] if i else "", tokens[i + 1] if i + 1 < len(tokens) else ""
        left = right = token in BOTH
        if token == '"':
            left, right, quoted = quoted, not quoted, not quoted
        elif token == "'":
            alone = not single and not _has_partner(tokens, i)
            decade = alone and not before.endswith(LIKE_S) and re.fullmatch(r"\d0s|\d\d", after)  # the '70s
            possessive = alone and before.endswith(LIKE_S)
            if possessive or decade:
                left, right = not decade, bool(decade)
            else:
                left, right, single = single, not single, not single
        elif token == "...":
            left = bool(before) and before not in (".", ",", ":")
            right = glued
        elif token == "’":
            left, right = True, bool(CONTRACTION.fullmatch(after))
        elif token in LEFT or ENDING.fullmatch(token) or re.fullmatch(r"\.{4,}", token):
            left = True
        elif token in RIGHT:
            right = True
        elif token == "#":
            right = after[:1].isdigit()
        elif token == "–":
            day = re.fullmatch(r"\d{4}", before) and i + 2 < len(tokens) and tokens[i + 2] in MONTHS
            left = right = before[-1:].isdigit() and after[:1].isdigit() and not day
        elif token == "/":
            left = right = not (before[:1].islower() and after[:1].isupper())
        spaces.append(bool(i) and not left and not glued)
        glued = right
    return spaces
