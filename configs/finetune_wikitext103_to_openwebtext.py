"""Pretrained on WikiText-103 in 18 steps of depth, fine-tuned on OpenWebText in any number: section 6.2 of the paper.

    python -m diffeqformer.main --config=configs/finetune_wikitext103_to_openwebtext.py:pretrain
    python -m diffeqformer.main --config=configs/finetune_wikitext103_to_openwebtext.py:lora \\
        --config.model.num_steps=24 --workdir=runs/wikitext103_to_openwebtext-lora-24

Modes, shape, hardware and hyperparameters: as in configs/finetune_openwebtext_to_wikitext103.py, which must lie beside
this file.
What to expect: not run.
"""

import pathlib
import runpy

OTHER = runpy.run_path(str(pathlib.Path(__file__).with_name("finetune_openwebtext_to_wikitext103.py")))["get_config"]


def get_config(mode: str = "full"):
    return OTHER(mode, pretraining="wikitext103", task="openwebtext")
