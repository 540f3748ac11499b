"""`experiments/full_scale.py` with runs that only pretend to train, and without a tokenizer."""

import json
import runpy
import sys

from diffeqformer.config import check_config, check_overrides, field_names, get_field
from diffeqformer.console.progress import Progress

sys.path.insert(0, "experiments")
import full_scale  # noqa: E402


def train(workdir, options, cores):
    """Check the run's config, print the fields in which it differs from the published one, and write its curves."""
    check_overrides(options)  # as `main` does
    path = options[0].removeprefix("--config=")
    published, config = (runpy.run_path(path)["get_config"]() for _ in range(2))
    for name, value in (option.removeprefix("--config.").split("=") for option in options[1:]):
        config.update_from_flattened_dict({name: type(get_field(config, name))(value)})
    check_config(config, num_devices=1)
    pairs = {name: (get_field(config, name), get_field(published, name)) for name in field_names(config)}
    print(json.dumps({name: ours for name, (ours, theirs) in pairs.items() if ours != theirs}))
    writer = Progress(workdir, 0, config.steps, tokens_per_step=1000)
    rounded = config.model.dtype == "bfloat16"
    for step in range(10, config.steps + 1, 10):
        writer.train(step, {"loss": 7 - step / 10 + 0.25 * (rounded and step == 10), "gradient_norm": 10 / step})
    loss = 3 + (0.5 + config.seed) * rounded
    writer.validation(config.steps, {"loss": loss, "perplexity": 20.0, "bits_per_byte": 2.0})
    writer.close()


def plot_little(results, path):
    """One config's panels, once, since drawing takes most of the time."""
    if not path.exists():
        plot({row: result for row, result in results.items() if row.config == "large"}, path)


plot, full_scale.plot = full_scale.plot, plot_little
full_scale.train, full_scale.make_tokenizer = train, lambda: None
full_scale.app.run(full_scale.main)
