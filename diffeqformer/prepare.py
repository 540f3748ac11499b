"""Prepare a config's token store, as training would: `python -m diffeqformer.prepare --config=small`."""

from ml_collections import ConfigDict

from diffeqformer.config import check_config, check_fields, check_overrides, check_rules, check_tokenizer, explain
from diffeqformer.console import command_line
from diffeqformer.data.preparation import open_prepared, prepare, store_folder, tokenizer_of
from diffeqformer.data.remote import check_writable, has_store, upload
from diffeqformer.data.store import read_about, verify
from diffeqformer.rules import RULES


def run(config: ConfigDict) -> None:
    """Prepare the config's store, or verify it if it exists.

    With `config.data.remote`, a store that is there is copied to here, and one that isn't is copied to there.
    """
    if config.base:  # whose model training will check
        check_fields(config)
        check_rules((rule for rule in RULES if rule.alone or rule.field.startswith("data.")), config)
    else:
        check_config(config, num_devices=None)  # preparation and training may run on different machines
    tokenizer = tokenizer_of(config.data)
    if not config.base:  # with a base, training checks the vocabulary
        check_tokenizer(config, tokenizer)
    folder, remote = store_folder(config.data, tokenizer), config.data.remote
    was_there = folder.exists()
    if remote and not has_store(remote, folder.name):
        check_writable(remote)
        if not was_there:
            prepare(config.data, tokenizer)
    open_prepared(config.data, tokenizer, config.sequence_length)
    if was_there:
        verify(folder, about := read_about(folder), tokenizer.vocab_size)
        print(f"{folder}: this token store is there already, whole and as it was written")
        for name, split in about["splits"].items():
            print(f"  {name}: sha256 {split['sha256'][:12]}")
    if remote:
        upload(folder, remote)


if __name__ == "__main__":
    config = command_line.define_config()
    command_line.run(
        lambda: run(config.value),
        check_overrides,
        explain,
        interrupted="interrupted; finished shards stay, and the same command continues from them",
    )
