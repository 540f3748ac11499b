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


PROSE = [
    (r" @([-,.])@ ", r"\1"),  # well @-@ fed, 1 @,@ 000
    (r" (?=['’]\w)", ""),  # don 't, O 'Hara
    (r" ’ (?=(?:s|t|m|re|ve|ll|d) )", "’"),
    (r"(?<=s) '(?= )", "'"),  # the hens ' nest
    (r"(?<= )' ([^']*?) ?'(?= )", r"'\1'"),
    (r'(?<= )" ([^"]*?) "(?= )', r'"\1"'),
    (r"(\d) ([–:]) (?=\d)", r"\1\2"),  # pages 3 – 5, 17 : 45
    (r" ([—‑⁄/]) ", r"\1"),
    (r" (?=(?:[,.;:!?%)\]}°′″½¼¾”’]|\.{2,}) )", ""),  # no space before these,
    (r"(?<= )([(\[{$£€₤¥“‘]) ", r"\1"),  # and none after these
    (r"(?<==) (?==)", ""),  # = = Section = =
]
"""What undoes the tokenisation of a line with a space at either end, in this order: patterns and replacements."""


def detokenize(text: str) -> str:
    """Undo WikiText's tokenisation, line by line: `the 1 @,@ 000 dogs ' ( or so )` becomes `the 1,000 dogs' (or so)`.

    Only white space and the `@` of `@-@`, `@,@` and `@.@` change. `<unk>` stays, because the original words are lost.
    Ambiguous tokens get the more common reading: a `'` after an s is a possessive, and others open and close
    quotations.
    """
    lines = []
    for line in text.split("\n"):
        line = f" {' '.join(line.split())} "
        for pattern, replacement in PROSE:
            line = re.sub(pattern, replacement, line)
        lines.append(line.strip())
    return "\n".join(lines)
