"""The paper's tables, figures and appendices, and the commands that make each (paper.py).

In a command line, {folder}, {wikitext}, {tasks}, {tokenizer}, {include} and {text} stand for options of paper.py.
"""

import shlex
from collections.abc import Iterable
from typing import NamedTuple

AT_SCALE = "--rates=1.5e-4,3e-4,6e-4 --steps=40001"  # the published rate of these sizes, half and twice it
LARGE, LLAMA = ("large-gpt", "large"), ("llama_1b-llama", "llama_1b")


class Command(NamedTuple):
    """A command line after `python`; one that writes a report into a new folder, `output`, is run only once."""

    line: str
    output: str = ""


class Exhibit(NamedTuple):
    """A table, a figure or an appendix.

    shows: what it is.
    published: what the paper has there, as far as its text says.
    """

    shows: str
    published: str
    tiny: tuple[Command, ...]
    at_scale: tuple[Command, ...]


def study(name: str, options: str = "") -> Command:
    """A study of experiments/ablations.py, which resumes by itself."""
    places = "--folder={folder}/studies --results={folder}/studies/results.json"
    return Command(f"experiments/ablations.py --study={name} {places} {options}".strip())


def train(config: str, options: str = "") -> Command:
    """A run of the folder, by a config and the model after its colon."""
    file, colon, model = config.partition(":")
    name = config.replace(":", "-")
    return Command(
        f"-m diffeqformer.main --config=configs/{file}.py{colon}{model} --workdir={{folder}}/{name} {options}".strip()
    )


def evaluate(name: str, split: str = "validation", step: str = "") -> Command:
    """The perplexities of a run of the folder, at its last step or at that given."""
    output = "-".join(filter(None, [name, split, step]))
    which = f" --step={step}" if step else ""
    return Command(
        f"-m diffeqformer.evaluate --workdir={{folder}}/{name} --split={split}{which} --output={{folder}}/{output}",
        output,
    )


def compare(output: str, *names: str) -> Command:
    """The validation curves of runs of the folder in one picture, and a table."""
    runs = " ".join(f"{{folder}}/{name}" for name in names)
    return Command(f"-m diffeqformer.compare {runs} --output={{folder}}/{output}", output)


def downstream(output: str, runs: Iterable[str], options: str = "") -> tuple[Command, Command]:
    """The downstream tasks of runs of the folder, or of those that match patterns, the baseline first, and tables."""
    folders = ",".join(f"{{folder}}/{run}" for run in runs)
    line = f"-m diffeqformer.downstream --workdir={folders} --output={{folder}}/{output} {options}".strip()
    return Command(line, output), Command(f"experiments/downstream.py --results={{folder}}/{output}")


def seeds(form: str, which: str = "[123]") -> str:
    """A pattern of the runs that a study shows: those of a form's best rate, with the seeds after 0."""
    return f"studies/tiny-{form}-[0-9]*-seed_{which}-1500_steps-own_text"


def analyze(run: str, parts: str, output: str) -> Command:
    """Parts of the report on a run of the folder, or on the one that matches a pattern."""
    text = " {text}" if parts == "sensitivity" else ""
    return Command(
        f"-m diffeqformer.analyze --workdir={{folder}}/{run} --parts={parts} --output={{folder}}/{output}{text}",
        output,
    )


def analyze_seeds(figure: str, parts: str, *models: str) -> tuple[Command, ...]:
    """Parts of the reports on models of a study, of its best rates and three seeds, and their means."""
    each = [(model, seed) for model in models for seed in "123"]
    reports = (analyze(seeds(model, which=seed), parts, f"{figure}-{model}-seed-{seed}") for model, seed in each)
    patterns = " ".join(f"--report={{folder}}/{figure}-{model}-seed-?" for model in models)
    means = Command(f"experiments/reports.py {patterns} --results={{folder}}/{figure}.json")
    return (study("perplexity"), *reports, means)


def no_command(shows: str, published: str) -> Exhibit:
    """An exhibit that no command makes."""
    return Exhibit(shows, published, (), ())


LLAMA_FILE = "--config.data.tokenizer_file={tokenizer}"
DOWNSTREAM = Exhibit(
    "accuracies of eleven tasks without and with five examples, with standard errors, bars, and paired tests",
    "its tables stand beside the results (docs/downstream.md), which toy tasks can't be compared with",
    (
        study("perplexity"),
        *downstream("downstream", (seeds("gpt"), seeds("diffeqformer")), "--include={tasks} --shots=0,1"),
    ),
    (train("large:gpt"), train("large"), *downstream("downstream", LARGE, "{include}")),
)
DOWNSTREAM_LLAMA = DOWNSTREAM._replace(
    tiny=(
        study("llama"),
        *downstream(
            "downstream-llama",
            (seeds("llama"), seeds("diffeqformer-llama")),
            "--include={tasks} --shots=0,1",
        ),
    ),
    at_scale=(
        train("llama_1b:llama", LLAMA_FILE),
        train("llama_1b", LLAMA_FILE),
        *downstream("downstream-llama", LLAMA, "{include}"),
    ),
)
EMBEDDING = (study("embedding"),)
WIDTHS = "--width=20 --width=48 --width=72 --width=96 --width=120 --width=144"
EMBEDDING_OF_LARGE = (study("embedding", f"--config=configs/large.py {WIDTHS} {AT_SCALE}"),)
SIZES, SIZES_OF_MEDIUM = (
    (Command(f"benchmarks/embedding.py {options} --output={{folder}}/embedding", "embedding"),)
    for options in (
        "--shape=tiny --rounds=20 --embed_dim=4 --embed_dim=12 --embed_dim=24 --embed_dim=48 --embed_dim=96",
        "--shape=medium --batch_size=32",
    )
)


def scored(output: str, *configs: str, options: str = "") -> tuple[Command, ...]:
    """Runs of configs, each scored on its validation split, and all of them compared."""
    names = [config.replace(":", "-") for config in configs]
    commands = [(train(config, options), evaluate(name)) for config, name in zip(configs, names)]
    return (*(command for pair in commands for command in pair), compare(output, *names))


def finetuned(pretraining: str, task: str, split: str) -> tuple[Command, ...]:
    """The published fine-tuning in one direction: two bases, each fine-tuned and scored, and all compared."""
    config = f"finetune_{pretraining}_to_{task}"
    commands, names = [], []
    for model, depths in (("", (9, 12, 18, 24)), ("-gpt", (24,))):
        base = f"{config}-pretrain{model}"
        commands.append(train(f"{config}:pretrain{model}"))
        for mode, depth in ((mode, depth) for mode in ("lora", "full") for depth in depths):
            name = f"{config}-{mode}{model}-{depth}"
            names.append(name)
            commands += [
                Command(
                    f"-m diffeqformer.main --config=configs/{config}.py:{mode}{model} --config.base={{folder}}/{base} "
                    f"--config.model.num_steps={depth} --workdir={{folder}}/{name}"
                ),
                evaluate(name, split, "best" if mode == "full" else ""),
            ]
    return (*commands, compare(f"{config}-compared", *names))


WIKITEXT_MODELS = [f"wikitext103_{size}{model}" for size in ("small", "medium") for model in ("", ":gpt", ":shared")]
SIMULATION = (Command("experiments/simulation.py --output={folder}/simulation", "simulation"),)


def analyze_runs(exhibit: str, parts: str, *configs: str) -> tuple[Command, ...]:
    """Runs of configs, and parts of the report on each."""
    runs = [(train(config), config.replace(":", "-")) for config in configs]
    return tuple(command for run, name in runs for command in (run, analyze(name, parts, f"{exhibit}-{name}")))


def sensitivities(run: str) -> tuple[Command, ...]:
    """The sensitivity of a run's predictions after each of `EXAMPLES`."""
    return tuple(
        Command(
            f"-m diffeqformer.analyze --workdir={{folder}}/{run} --parts=sensitivity --text={shlex.quote(text)} "
            f"--output={{folder}}/appendix-f-{number}",
            f"appendix-f-{number}",
        )
        for number, text in enumerate(EXAMPLES, 1)
    )


EXAMPLES = (
    "The company said on Monday that it would sell",
    "When Mary and John went to the shop, John gave a drink to",
    "The capital of France is Paris, and the capital of Italy is",
)
"""Texts whose next word depends on one or two of their words. Those of the paper are in pictures only."""
LLAMA_AT_SCALE = scored("figure-8", "llama_1b", "llama_1b:llama", options=LLAMA_FILE)

EXHIBITS = {
    "table 1": Exhibit(
        "perplexity on WikiText-103: GPT, shared weights and DiffEqFormer, small and medium",
        "DiffEqFormers are the best; the numbers aren't at hand",
        (study("perplexity"),),
        scored("table-1", *WIKITEXT_MODELS),
    ),
    "table 2": Exhibit(
        "perplexity on OpenWebText: small, medium, large and Llama-1B",
        "DiffEqFormer with Llama's block 9.7, Llama-1B 10.2 (read off Figure 8); the other numbers aren't at hand",
        (study("perplexity"), study("llama")),
        scored("table-2", "small", "small:gpt", "medium", "medium:gpt", "large", "large:gpt") + LLAMA_AT_SCALE,
    ),
    "table 3": no_command("sizes of the vanilla models", "117M, 345M, 762M, 1213M (docs/fidelity.md)"),
    "table 4": DOWNSTREAM,
    "table 5": DOWNSTREAM_LLAMA,
    "table 6": Exhibit(
        "parameters of a DiffEqFormer by d_emb",
        "not at hand (docs/fidelity.md has the code's)",
        SIZES,
        SIZES_OF_MEDIUM,
    ),
    "figure 1": no_command("the architecture", "a picture; docs/architecture.md has this project's"),
    "figure 2": Exhibit(
        "spectra of QK and OV over time, induction scores, and how sharp attention is; clusters of the simulation with "
        "constant and growing weights",
        "magnitudes grow and peak near the last layers; growing weights don't cluster (docs/analysis.md on that)",
        analyze_seeds("figure-2", "spectra,induction,sharpness", "gpt", "diffeqformer") + SIMULATION,
        analyze_runs("figure-2", "spectra,induction,sharpness", "medium:gpt", "medium") + SIMULATION,
    ),
    "figure 3": Exhibit(
        "Lyapunov sensitivity of a prediction to each token",
        "in its sentence about BIGBANG, that word is highlighted for the next word 'its'; our text of the paper lacks "
        "the sentence, so give one by --text",
        analyze_seeds("figure-3", "sensitivity", "diffeqformer"),
        (train("medium"), analyze("medium", "sensitivity", "figure-3-medium")),
    ),
    "figure 4": Exhibit(
        "overfitting: validation curves on a short text",
        "GPT-medium overfits WikiText-103, DiffEqFormer less",
        (study("overfitting", "--wikitext={wikitext}"),),
        scored("figure-4", "wikitext103_medium", "wikitext103_medium:gpt"),
    ),
    "figure 5": Exhibit(
        "fine-tuning at other depths, with LoRA and of all weights, in both directions",
        "OpenWebText to WikiText-103 with LoRA: 21.4 at 18 and 24 steps, 22.4 at 12, 23.5 at 9, GPT 22.1; all weights: "
        "19.5 to 20.5 at best (read off)",
        (
            Command(
                "experiments/finetune_depths.py --wikitext={wikitext} --folder={folder}/finetune_depths "
                "--results={folder}/finetune_depths/results.json"
            ),
        ),
        finetuned("openwebtext", "wikitext103", "test") + finetuned("wikitext103", "openwebtext", "validation"),
    ),
    "figure 6": no_command("a picture", "not at hand: the text of the paper doesn't mention it"),
    "figure 7": Exhibit(
        "Adam's second beta, 0.95 and 0.999, for DiffEqFormer and GPT",
        "a lower value is better for DiffEqFormer-large, the standard one, 0.999, for GPT-large",
        (study("beta2"),),
        (study("beta2", f"--config=configs/large.py {AT_SCALE}"),),
    ),
    "figure 8": Exhibit(
        "validation curves with the block of a Llama",
        "9.7 against 10.2 at 40,000 steps (read off)",
        (study("llama"),),
        LLAMA_AT_SCALE,
    ),
    "figure 9": DOWNSTREAM._replace(published="Table 4 without examples"),
    "figure 10": DOWNSTREAM._replace(published="Table 4 with five examples"),
    "figure 11": DOWNSTREAM_LLAMA._replace(published="Table 5 without examples"),
    "figure 12": DOWNSTREAM_LLAMA._replace(published="Table 5 with five examples"),
    "figure 13": Exhibit(
        "trajectories of the simulation of clustering",
        "weights that grow faster than linearly don't form clusters",
        SIMULATION,
        SIMULATION,
    ),
    "figure 14": Exhibit("perplexity by d_emb", "better up to 144", EMBEDDING, EMBEDDING_OF_LARGE),
    "figure 15": Exhibit("throughput by d_emb", "a slight fall", SIZES, SIZES_OF_MEDIUM),
    "figure 16": Exhibit("memory by d_emb", "grows less than the parameters", SIZES, SIZES_OF_MEDIUM),
    "figure 17": no_command("the two designs of Figure 18", "a picture; diffeqformer/depth/generated.py has both"),
    "figure 18": Exhibit(
        "one MLP of t for all weights, or one for each",
        "one for each is better",
        (study("design"),),
        (study("design", f"--config=configs/medium.py {AT_SCALE}"),),
    ),
    "appendix A": no_command("weights as functions of time", "the formulas of diffeqformer/depth/generated.py"),
    "appendix B": no_command(
        "the Lyapunov exponent and its derivation", "the formulas of diffeqformer/analysis/lyapunov.py"
    ),
    "appendix C": no_command("data, settings and baselines", "what configs/ and docs/fidelity.md say; Figures 7 to 13"),
    "appendix D": no_command("ablations", "Table 6 and Figures 14 to 18"),
    "appendix E": Exhibit(
        "spectra of QK and OV: models of OpenWebText and of WikiText-103, and vanilla transformers; at tiny scale, of "
        "one text",
        "those of DiffEqFormers change smoothly, those of vanilla transformers without a clear pattern",
        analyze_seeds("appendix-e", "spectra", "gpt", "diffeqformer"),
        analyze_runs(
            "appendix-e", "spectra", "small", "medium", "large", "wikitext103_small", "wikitext103_medium", "medium:gpt"
        )
        + (train("llama_1b", LLAMA_FILE), analyze("llama_1b", "spectra", "appendix-e-llama_1b")),
    ),
    "appendix F": Exhibit(
        "Lyapunov sensitivities of more texts, beside attention and gradients",
        "pictures whose texts aren't at hand",
        (study("perplexity"), *sensitivities(seeds("diffeqformer", which="1"))),
        (train("medium"), *sensitivities("medium")),
    ),
}
"""All that the paper shows. Curves of single runs are in TensorBoard."""
