"""Pretrained on OpenWebText in 18 steps of depth, fine-tuned on WikiText-103 in any number: section 6.2 of the paper.

    python -m diffeqformer.main --config=configs/finetune_openwebtext_to_wikitext103.py:pretrain
    python -m diffeqformer.main --config=configs/finetune_openwebtext_to_wikitext103.py:lora \\
        --config.model.num_steps=9 --workdir=runs/openwebtext_to_wikitext103-lora-9

:full trains all weights. :lora trains adapters of rank 200 and the embeddings. :pretrain-gpt, :full-gpt and :lora-gpt
use the baseline of 24 layers. --config.base=FOLDER fine-tunes any other run, which then sets the model's shape.

Shape: GPT-medium's, with E = 100 (1.33 B parameters; 0.28 B as 18 layers).
Hardware: 8 GPUs or TPU chips. On one device: --config.mesh.fsdp=1.
Hyperparameters: as published.
What to expect: not run. By the authors' Figure 5, perplexities of about 21.4 with LoRA at 18 and 24 steps, 22.4 at
12, 23.5 at 9, and 22.1 for GPT; 19.5 to 20.5 at best when all weights are trained. By their script these are of the
test split: compare them with `python -m diffeqformer.evaluate --split=test`, and the latter with `--step=best`, too.
"""

from diffeqformer.config import base_config
from diffeqformer.errors import UserError


def get_config(mode: str = "full", pretraining: str = "openwebtext", task: str = "wikitext103"):
    stage, _, model = mode.partition("-")
    if stage not in ("pretrain", "full", "lora") or model not in ("", "gpt"):
        known = ":pretrain, :full or :lora, or one of these with -gpt"
        raise UserError(f"--config: must end with {known}, but it is :{mode}")
    first = f"pretrain_{pretraining}" + (f"-{model}" if model else "")
    config = base_config(first, model or ("diffeqformer" if stage == "pretrain" else "discretized"))
    config.name = first
    config.steps, config.batch_size = 10_001, 256
    config.eval_every = config.checkpoint_every = 200
    config.optimizer.update(learning_rate=3e-4, decay="everything")
    config.mesh.fsdp = 8
    config.model.num_steps = 24 if model else 18
    if stage == "pretrain":
        config.data.task, config.microbatches, config.model.remat = pretraining, 4, "products"
        config.model.update(width=1024, heads=16, mlp=4096, time_embed_dim=100, sinusoidal_dim=256, vocab_multiple=128)
    else:
        config.name, config.data.task, config.base = f"{pretraining}_to_{task}-{mode}", task, f"runs/{first}"
        if stage == "lora":
            config.model.update(lora_rank=200, lora_start="published")
    return config
