"""GPT-medium's shape on OpenWebText: 1024 wide, 24 steps, E = 96 (1.27 B parameters; GPT 355 M).

    python -m diffeqformer.main --config=configs/medium.py           # :gpt and :shared are the baselines

Hardware: 8 GPUs or TPU chips (the authors used two A100 with 80 GB). Parameters and Adam moments are sharded, 2 GB on
each. Each device also holds the activations of its part of the batch. On one device, such as an H100 (by its memory
alone): --config.mesh.fsdp=1 --config.microbatches=0.
Hyperparameters: the authors' published configuration.
What to expect: not run, but for some steps on one H200 (benchmarks/README.md).

The corpus, about 40 GB of text, is downloaded and prepared at the first start. `python -m diffeqformer.prepare` with
the same --config does that beforehand.
"""

from diffeqformer.config import as_recipe, base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("medium", model)
    config.steps = 40_001
    config.batch_size = 256
    config.microbatches = 4  # of 8 sequences on each of 8 devices
    config.model.update(width=1024, heads=16, mlp=4096, num_steps=24, time_embed_dim=96, vocab_multiple=128)
    config.model.remat = "products"
    config.mesh.fsdp = 8
    config.optimizer.learning_rate = 3e-4
    return as_recipe(config) if model == "recipe" else config
