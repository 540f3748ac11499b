"""Upload a model to the Hugging Face hub: `python -m diffeqformer.push --from=models/tiny --to=hf://owner/tiny`.

The folder is one that `export` wrote, or that of a run. The hub's token is that of HF_TOKEN or `hf auth login`.
"""

import pathlib
import re

from absl import flags, logging

from diffeqformer.console import command_line
from diffeqformer.errors import UserError

LEFT_OUT = [".*", "*/.*", "*.partial-*"]
"""Files that belong to nobody: hidden ones, and what an interrupted command left."""


def push(folder: pathlib.Path, to: str, private: bool = False) -> str:
    """Upload a folder as one commit of a model's repository, which is made if there is none, and return its address.

    Files that the folder lacks stay. A UserError says if it holds no model, there is no token, or the hub refuses.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)", to)
    if not found:
        raise UserError(f"--to: must be hf://OWNER/NAME, but it is {to}")
    if not (folder / "config.json").is_file() and not (folder / "checkpoints").is_dir():
        raise UserError(f"--from: {folder} holds no model; give a folder that export wrote, or that of a run")
    from huggingface_hub import HfApi, get_token

    from diffeqformer.data.hub import asking_hub

    if not get_token():
        raise UserError("--to: the hub needs a token that may write; set HF_TOKEN, or run `hf auth login`")
    with asking_hub(to, "check that the token may write there, or try again later"):
        HfApi().create_repo(found[1], private=private, exist_ok=True)
        how = dict(commit_message=f"Upload {folder.resolve().name}", ignore_patterns=LEFT_OUT)
        commit = HfApi().upload_folder(repo_id=found[1], folder_path=folder, **how)
    return str(commit.repo_url)


if __name__ == "__main__":
    folder = flags.DEFINE_string("from", None, "Folder of the model.", required=True)
    to = flags.DEFINE_string("to", None, "hf://OWNER/NAME", required=True)
    private = flags.DEFINE_bool("private", False, "Make a new repository private.")

    def command() -> None:
        print(push(pathlib.Path(folder.value), to.value, private.value))

    command_line.run(command, verbosity=logging.FATAL)
