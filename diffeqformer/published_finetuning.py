"""The paper's recipe for fine-tuning at another depth (section 6.2), as configs.

docs/finetuning.md describes such runs; `diffeqformer.training.finetune` implements them.
"""

from ml_collections import ConfigDict

from diffeqformer.config import base_config
from diffeqformer.errors import UserError


def finetuning(pretraining: str, task: str, mode: str) -> ConfigDict:
    """The paper's recipe (section 6.2): pretrain on one corpus, fine-tune on another; GPT-medium's shape, 18 steps.

    Args:
        pretraining, task: the two corpora.
        mode: pretrain, full or lora. With the suffix -gpt: the same for the GPT baseline of 24 layers.

    Raises:
        UserError: if there is no such mode.
    """
    stage, _, model = mode.partition("-")
    if stage not in ("pretrain", "full", "lora") or model not in ("", "gpt"):
        raise UserError(
            f"--config: must end with :pretrain, :full or :lora, or one of these with -gpt, but it is :{mode}"
        )
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
