"""TFDS builders of WikiText-103 and OpenWebText. Import this module only where TensorFlow may be imported.

Importing it registers `wikitext103/detokenized`, `wikitext103/raw` and `openwebtext`. Their files and documents are
those of `diffeqformer.data.sources`.
"""

from collections.abc import Iterable

import tensorflow_datasets as tfds

from diffeqformer.data.sources import DetokenizedWikitext, HubTexts, OpenWebText, RawWikitext

MANUAL = "docs/data.md of diffeqformer says which files in manual_dir replace a download."


def _find(texts: HubTexts, dl_manager: tfds.download.DownloadManager) -> None:
    """Find the files of a corpus, or download them."""
    try:
        manual = dl_manager.manual_dir
    except AssertionError:  # TFDS raises this if manual_dir is missing or empty
        manual = None
    texts.find(dl_manager.download_dir, manual)


class Wikitext103(tfds.core.GeneratorBasedBuilder):
    """WikiText-103, one article per example, in the order of the source."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="detokenized", description="As prose: dlwh/wikitext_103_detokenized."),
        tfds.core.BuilderConfig(name="raw", description="As tokens, without <unk>: Salesforce/wikitext."),
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return _text_info(self, "Featured and good articles of Wikipedia (Merity et al., 2016).")

    def _split_generators(self, dl_manager):
        texts = RawWikitext() if self.builder_config.name == "raw" else DetokenizedWikitext()
        _find(texts, dl_manager)
        return {split: self._generate_examples(texts.documents(split)) for split in texts.splits}

    def _generate_examples(self, texts: Iterable[str]):
        for row, text in enumerate(texts):
            yield row, {"text": text}


class Openwebtext(tfds.core.GeneratorBasedBuilder):
    """OpenWebText, as `diffeqformer.data.sources.OpenWebText` has it."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = MANUAL

    def _info(self) -> tfds.core.DatasetInfo:
        return _text_info(self, "Web pages that Reddit links to (Gokaslan and Cohen, 2019).")

    def _split_generators(self, dl_manager):
        texts = OpenWebText()
        _find(texts, dl_manager)
        return {split: self._generate_examples(texts.documents(split), texts.number(split)) for split in texts.splits}

    def _generate_examples(self, texts: Iterable[str], count: int):
        """Beyond 1 GB, TFDS sorts examples in buckets, cut evenly from keys of 128 bits: so the keys fill these."""
        for row, text in enumerate(texts):
            yield row * (2**128 // count), {"text": text}


def _text_info(builder: tfds.core.DatasetBuilder, description: str) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=builder,
        description=description,
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        disable_shuffling=True,  # keep the order of the source; the keys are integers
    )
