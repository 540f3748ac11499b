from diffeqformer.config import base_config


def get_config(model: str = "diffeqformer"):
    config = base_config("tiny", model)
    config.steps = 1500
    config.batch_size = 8
    config.sequence_length = 128
    config.model.update(
        width=128,
        heads=4,
        mlp=512,
        num_steps=6,
        vocab_size=257,
        max_length=128,
        time_embed_dim=24,
        sinusoidal_dim=32,
        generator_start="varying",
        dropout=0.0,
        dtype="float32",
    )
    config.optimizer.learning_rate = 3e-3
    config.optimizer.beta2 = 0.95
    config.data.task = "python_stdlib"
    config.sample.prompt = "def "
    config.sample.length = 128
    return config
