"""GPT-medium's shape on WikiText-103: 1024 wide, 24 steps, E = 48 (670 M parameters; GPT 355 M).

    python -m diffeqformer.main --config=configs/wikitext103_medium.py    # :gpt and :shared are the baselines

Hardware: 8 GPUs or TPU chips. Parameters and Adam moments are sharded, 1 GB on each. Each device also holds the
activations of its part of the batch. On one device: --config.mesh.fsdp=1.
Hyperparameters: the authors' published configuration.
What to expect: not run; the authors saw GPT overfit at this size.

The corpus, about 0.5 GB of detokenized text, is downloaded at the first start.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("wikitext103_medium", model)
    config.steps = 10_001
    config.batch_size = 256
    config.microbatches = 4  # of 8 sequences on each of 8 devices
    config.model.update(width=1024, heads=16, mlp=4096, num_steps=24, time_embed_dim=48, vocab_multiple=128)
    config.model.remat = "products"
    config.mesh.fsdp = 8
    config.optimizer.learning_rate = 3e-4
    config.data.task = "wikitext103"
    return as_recipe(config) if model == "recipe" else config
