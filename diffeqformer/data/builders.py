"""TFDS builders of WikiText-103 and OpenWebText. Import this module only where TensorFlow may be imported.

Importing it registers `wikitext103/detokenized`, `wikitext103/raw` and `openwebtext`. Their files and documents are
those of `diffeqformer.data.sources`.
"""

from collections.abc import Callable

import tensorflow_datasets as tfds

from diffeqformer.data.sources import DetokenizedWikitext, HubTexts, OpenWebText, RawWikitext


class _HubBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The documents of a corpus of the hub, one per example, in the order of the source."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = "docs/data.md of diffeqformer says which files in manual_dir replace a download."

    texts: Callable[[], HubTexts]

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            disable_shuffling=True,  # keep the order of the source; the keys are integers
        )

    def _split_generators(self, dl_manager):
        try:
            manual = dl_manager.manual_dir
        except AssertionError:  # TFDS raises this if manual_dir is missing or empty
            manual = None
        texts = self.texts()
        texts.find(dl_manager.download_dir, manual)
        return {split: self._generate_examples(texts, split) for split in texts.splits}

    def _generate_examples(self, texts: HubTexts, split: str):
        """Beyond 1 GB, TFDS sorts examples in buckets, cut evenly from keys of 128 bits: so the keys fill these."""
        step = 2**128 // texts.number(split)
        for row, text in enumerate(texts.documents(split)):
            yield row * step, {"text": text}


class Wikitext103(_HubBuilder):
    """Featured and good articles of Wikipedia (Merity et al., 2016)."""

    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="detokenized", description="As prose: dlwh/wikitext_103_detokenized."),
        tfds.core.BuilderConfig(name="raw", description="As tokens, without <unk>: Salesforce/wikitext."),
    ]

    def texts(self) -> HubTexts:
        return RawWikitext() if self.builder_config.name == "raw" else DetokenizedWikitext()


class Openwebtext(_HubBuilder):
    """Web pages that Reddit links to (Gokaslan and Cohen, 2019)."""

    texts = OpenWebText
