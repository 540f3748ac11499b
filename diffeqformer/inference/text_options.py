"""The options that choose a text and its windows, for all commands that score one."""

import os
import pathlib

from absl import flags

from diffeqformer.checkpoints.checkpoint import Checkpoint
from diffeqformer.console import command_line
from diffeqformer.data.files import OPENERS, layout_of, matching_files
from diffeqformer.data.preparation import store_folder
from diffeqformer.data.quiet import quiet
from diffeqformer.data.remote import read_split
from diffeqformer.data.store import SPLITS, Split, open_store, read_about, verify
from diffeqformer.data.texts import CORPORA, open_corpus, stored_documents
from diffeqformer.errors import UserError, printable
from diffeqformer.inference.perplexity import Evaluation


def define_text_flags(folder: str) -> None:
    """The options that choose a model, a text and the `folder` of results, for all commands that score."""
    flags.DEFINE_string("workdir", None, "Folder of the run, or of a materialized model.", required=True)
    command_line.define_step()
    flags.DEFINE_string("task", None, "The corpus; by default the training's.")
    flags.DEFINE_string("split", "validation", "Its split: validation, or test if there is one.")
    flags.DEFINE_string("files", None, "Files to score instead (text, .jsonl, .parquet; patterns); empty: the corpus.")
    flags.DEFINE_string("text_field", None, "The field or column of --files that has the text; by default training's.")
    flags.DEFINE_string("separator", None, "What separates the documents of a plain-text file; by default training's.")
    flags.DEFINE_string("remote", None, "URL of token stores that have the text. Never taken from the checkpoint.")
    flags.DEFINE_string("module", None, "A Python module that adds corpora. Never taken from the checkpoint.")
    flags.DEFINE_integer("window", None, "Tokens of a window; by default as in training.")
    flags.DEFINE_integer("batch_size", 16, "Windows scored at once, over all devices.", 1, 2**16)
    help_text = f"Folder of the results; by default a new one in <workdir>/{folder}, or within runs/ for one on gs://."
    flags.DEFINE_string("output", None, help_text)


def text_of(options, opened: Checkpoint) -> tuple[str, list[str] | None, Split | None]:
    """The corpus, and the local files or the split of the training's token store to use instead of it, if any.

    By default they are as in training, and the store is preferred to the files.
    """
    data = opened.config.data
    task, files, split = options.task or data.task, options.files, options.split
    if files is not None or task != data.task or split not in SPLITS:
        if options.remote is not None:
            raise UserError(
                "--remote: must go without --files and with the corpus of the training and its split train or "
                f"validation, which are all that its store has, but the text is {files or task!r}, {split}"
            )
        if files and options.module is not None:
            raise UserError("--module: must be left out with --files, which name the text themselves")
        return task, matching_files(files, "--files") if files else None, None
    if stored := stored_text(opened, split, options.remote):
        return task, None, stored
    name = f"--files: the default, config.data.{split}_files of the training"
    return task, matching_files(data[f"{split}_files"], name) if data.train_files else None, None


def name_of_text(options, task: str, files: list[str] | None) -> str:
    """What results are filed under: the corpus and its split, or the first file if files alone are scored."""
    if not options.files or options.task is not None:
        return f"{task}-{options.split}"
    first = pathlib.Path(files[0])
    first = first.with_suffix("").stem if first.suffix.lower() in OPENERS else first.stem
    return first + (f"-and-{len(files) - 1}-more" if len(files) > 1 else "")


def open_text(
    options, opened: Checkpoint, task: str, files: list[str] | None, stored: Split | None, window: int, stride: int
) -> Evaluation:
    """The text of `text_of`."""
    name = ", ".join(files) if files else f"{task}: the {options.split} split"
    if stored:
        documents = list(stored_documents(stored, opened.tokenizer))
        return Evaluation(documents, name, window, stride, stored.text_bytes)
    layout, own = layout_of(opened.config.data), {"field": options.text_field, "separator": options.separator}
    layout = layout._replace(**{name: value for name, value in own.items() if value is not None})
    module, tokenizer = opened.config.data.module, opened.tokenizer
    if module and options.module is None and not (files or task in CORPORA):
        raise UserError(  # importing what a checkpoint names would run its code
            f"--module: in training, the corpus {task!r} came from the module {module!r}; to import it, give "
            "--module=NAME"
        )
    texts = open_corpus(task, {options.split: files} if files else None, layout, options.module or "", "--module")
    texts.fetch()
    if options.split not in texts.splits:
        raise UserError(f"--split: {task} has {', '.join(texts.splits)}, but it is '{options.split}'")
    with quiet():  # otherwise TensorFlow reports a broken document, too, with a full traceback
        every = [text for text in texts.documents(options.split) if text.strip()]
    documents = [(text, [*tokenizer.encode(text), tokenizer.end_of_text]) for text in every]
    return Evaluation(documents, name, window, stride)


def stored_text(opened: Checkpoint, split: str, remote: str | None) -> Split | None:
    """The split as the training's token store has it, so that its text need not be here to be scored.

    The store is the one at `remote`, of which nothing is written here, or else the one in the training's `data.dir`, or
    where that was, if commands run in another folder.
    None if there is none, or if its ids aren't those of the checkpoint's record.
    """
    data, ours = opened.config.data, opened.about
    folder = store_folder(data, opened.tokenizer)
    if not folder.exists() and ours.store:
        folder = pathlib.Path(ours.store)
    if remote is not None:
        place = f"{remote}/{folder.name}"
        found, ids = read_split(remote, folder.name, split)
    elif os.path.isdir(folder):
        place = str(folder)
        try:
            splits = open_store(folder, opened.tokenizer.name, 1, None if data.train_files else ("",), data.task)
            verify(folder, read_about(folder), splits=[split])
        except (UserError, OSError) as error:  # it can't be read, is damaged, or has other text
            print(printable(f"Not used: {error}"), flush=True)
            return None
        found, ids = splits[split], splits["train"].sha256
    else:
        if data.remote:
            print(printable(f"--remote={data.remote} would take the text from the training's store"), flush=True)
        return None
    same = ids == ours.data_sha256 and (split == "train" or ours.validation_sha256 in ("", found.sha256))
    if not same or max(int(shard.max()) for shard in found.shards) >= opened.tokenizer.vocab_size:
        print(printable(f"The token store {place} isn't that of the training, and isn't used"), flush=True)
        return None
    print(printable(f"The text is that of the token store {place}; --files= takes the corpus itself"), flush=True)
    return found
