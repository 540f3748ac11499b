"""This project's models as a model class of lm-evaluation-harness (package `lm_eval`, the extra `eval`)."""

import collections
import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable

import jax
import lm_eval.api.model
import numpy as np
from jax.sharding import Mesh
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from diffeqformer import __version__
from diffeqformer.checkpoints import checkpoint, checksums
from diffeqformer.console.surroundings import at_home
from diffeqformer.console.terminal import show_progress
from diffeqformer.data.tokenizers import lost_in
from diffeqformer.errors import UserError
from diffeqformer.inference.reader import check_room, without_depth
from diffeqformer.inference.sampling import Choice, Text, encode_prompt, sample_keys, write_batches
from diffeqformer.inference.scoring import Scorer, Stretch, sliding_windows, window_size
from diffeqformer.parallel import hosts
from diffeqformer.parallel.mesh import make_mesh
from diffeqformer.solvers import SOLVERS
from diffeqformer.transformer import random_key

os.environ["DISABLE_MULTIPROC"] = "1"  # otherwise lm-eval forks, which JAX's threads don't survive
GENERATION_FIELDS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


@register_model("diffeqformer")
class HarnessModel(lm_eval.api.model.TemplateLM):
    """One checkpoint at one number of steps.

    counts: by task, the contexts so far, and how many of these were too long for the window and lost their start (whole
        texts have no context); the unknown ids of its texts, and how many of these texts decode to others.

    Args:
        num_steps: steps of depth; None: as trained.
        batch_size: sequences scored at once, over all devices, or texts written, by each; affects only the speed.
        window: ids that the model sees at once, at most its positions; None: the sequence length of training.
    """

    def __init__(
        self,
        opened: checkpoint.Checkpoint,
        num_steps: int | None = None,
        batch_size: int = 8,
        window: int | None = None,
        mesh: Mesh | None = None,
    ):
        super().__init__()
        self.max_length = window_size(window, opened.config, opened.model.max_length)
        self.num_steps = opened.model.num_steps if num_steps is None else num_steps
        self.scorer = Scorer(opened.model, num_steps, batch_size, mesh, opened.tokenizer)
        self.opened = dataclasses.replace(opened, model=without_depth(opened.model))
        self.counts = collections.defaultdict(collections.Counter)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "HarnessModel":
        """The model that lm-eval's command line describes. Its `device` and `max_batch_size` are ignored."""
        given = {**(additional_config or {}), **arg_dict, "device": None, "max_batch_size": None}
        values = {name: value for name, value in given.items() if value is not None}
        if "workdir" not in values:
            raise UserError("workdir: the folder of a run is needed, for example --model_args workdir=runs/tiny")
        workdir, step = at_home(str(values.pop("workdir"))), values.pop("step", None)
        for name, value in values.items():
            if name not in ("num_steps", "window", "batch_size"):
                raise UserError(
                    f"{name}: there is no such argument; use workdir, step, num_steps, window or batch_size"
                )
            if not re.fullmatch(r"-?\d{1,18}", str(value)):  # lm-eval makes floats and booleans of some texts
                raise UserError(f"{name}: must be a whole number, but it is {value!r}")
        opened = checkpoint.load(workdir, make_mesh(), step)
        return cls(opened, **{name: int(value) for name, value in values.items()})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "HarnessModel":
        return cls.create_from_arg_obj(lm_eval.utils.simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document and precedes a text without context."""
        return self.opened.tokenizer.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """The ids of a text. None of our tokenizers adds special tokens."""
        return encode_prompt(self.opened.tokenizer, string) if string else []

    def get_model_info(self) -> dict:
        """What lm-eval stores alongside its results."""
        lost = ("unknown_tokens", "altered_texts")
        return {
            **{f"model_{name}": sum(of[name] for of in self.counts.values()) for name in lost},
            "model_source": "diffeqformer",
            "model_config": self.opened.config.name,
            "model_step": self.opened.step,
            "model_num_steps": self.num_steps,
            "model_dtype": str(self.opened.model.dtype),
            "model_window": self.max_length,
        }

    def answers_as(self) -> str:
        """A hash of all that its answers depend on: two models with the same one give the same, up to rounding."""
        config, tokenizer, reader = self.opened.config.model, self.opened.tokenizer, self.scorer.reader
        solver = [name for name, solver in SOLVERS.items() if solver == self.opened.model.solver]
        how = [config.to_dict(), solver, self.num_steps, self.max_length, tokenizer.name, tokenizer.save(), __version__]
        how += [checksums.of_tree((reader.params, reader.weights)), jax.config.jax_default_matmul_precision]
        return hashlib.sha256(json.dumps(how).encode()).hexdigest()[:16]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether greedy decoding would produce it.

        Context and continuation are encoded together; a missing context is an end-of-text. A context too long for the
        window loses its start; a continuation too long for it is scored window by window.
        """
        pairs = []
        for request in requests:
            context, continuation = request.args
            before, ids = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            if not ids:
                raise UserError(
                    f"continuation: {continuation!r} after {context[-40:]!r} has no tokens of its own to be scored; "
                    "change the task file's doc_to_target or doc_to_choice"
                )
            # a context of only spaces has become part of the continuation
            pairs.append((request.args, before or [self.eot_token_id], ids))
            cut = len(before) > max(1, self.max_length + 1 - len(ids))
            self._count(request, lost_in(self.opened.tokenizer, context + continuation, before + ids), cut)
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _count(self, request: Instance, lost: tuple[int, bool], cut: bool | None = None) -> None:
        """Add up what the tokenizer has lost of a request, and whether its context, if it has one, was cut."""
        of_context = {} if cut is None else {"contexts": 1, "contexts_cut": cut}
        self.counts[request.task_name].update(of_context, unknown_tokens=lost[0], altered_texts=lost[1])

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """The results of `loglikelihood`, given ((context, continuation), the ids of both)."""
        return self._score([self._stretches(*ids) for _, *ids in requests], "Scoring", disable_tqdm)

    def _stretches(self, context: list[int], continuation: list[int]) -> list[Stretch]:
        """The whole continuation, after the end of the context, as far as it fits into the window."""
        if len(continuation) > self.max_length:
            return list(sliding_windows(continuation, self.max_length, self.max_length, context[-1]))
        ids = (context + continuation)[-(self.max_length + 1) :]
        return [Stretch(ids, len(ids) - len(continuation))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text in nats, from adjacent windows. The first id follows end-of-text.

        It is NaN for a text with unknown ids, so that nothing is divided by its words and bytes.
        """
        groups, lost = [], []
        for request in requests:
            [text] = request.args
            ids = self.tok_encode(text)
            groups.append(list(sliding_windows(ids, self.max_length, self.max_length, self.eot_token_id)))
            lost.append(lost_in(self.opened.tokenizer, text, ids))
            self._count(request, lost[-1])
        scores = self._score(groups, "Scoring texts", disable_tqdm)
        return [math.nan if unknown else total for (total, _), (unknown, _) in zip(scores, lost)]

    def _score(self, groups: list[list[Stretch]], what: str, disable_tqdm: bool) -> list[tuple[float, bool]]:
        """For each group of stretches: the sum of its log-probabilities, and whether all its ids are the likeliest."""
        stretches = [stretch for group in groups for stretch in group]
        scores = iter(self.scorer(stretches, _progress(what, "tokens", disable_tqdm)))
        results = []
        for group in groups:
            parts = [next(scores) for _ in group]
            total = sum((float(part.log_probs.sum(dtype=np.float64)) for part in parts), 0.0)
            results.append((total, all(bool(part.likeliest.all()) for part in parts)))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The model's text after each context, up to its first stop string, which is not included.

        A batch has texts whose tokens are chosen in the same way. Decoding is greedy unless the request sets
        `do_sample` or a temperature. A context that is too long loses its start.
        """
        hosts.check_one("generate_until: generation")
        tokenizer, scorer, choices = self.opened.tokenizer, self.scorer, collections.defaultdict(list)
        for number, request in enumerate(requests):
            context, options = request.args
            ids, (count, until, choice) = self.tok_encode(context), generation(options, self.max_length)
            kept = (ids or [self.eot_token_id])[-(self.max_length - count) :]
            self._count(request, lost_in(tokenizer, context, ids), len(kept) < len(ids))
            choices[choice].append(Text(tokenizer, kept, count, until, number))
        size, steps = min(scorer.batch_size, len(requests)), len(scorer.reader.weights.step_sizes)
        check_room(self.opened.model, steps, self.max_length, size, "batch_size", divided=False)
        how = scorer.reader, self.max_length, tokenizer
        keys, results = sample_keys(random_key(0, "sample"), len(requests)), [""] * len(requests)
        show, done = _progress("Writing", "texts", disable_tqdm), 0
        for choice, alike in choices.items():
            for text, result in zip(alike, write_batches(*how, alike, keys, choice, size), strict=True):
                results[text.key] = result
                self.cache_hook.add_partial("generate_until", requests[text.key].args, result)
                done += 1
                show(done, len(requests))
        return results


def generation(options: dict, window: int) -> tuple[int, list[str], Choice]:
    """What a task's generation_kwargs ask for: tokens at most, the texts at which to stop, and how to choose tokens."""
    options = normalize_gen_kwargs(options, min(256, window // 2))
    if unknown := sorted(set(options) - GENERATION_FIELDS):
        raise UserError(f"generation_kwargs.{unknown[0]}: isn't supported; take {', '.join(sorted(GENERATION_FIELDS))}")
    count, until = options["max_gen_toks"], [stop for stop in options["until"] if stop]
    if not 1 <= count < window:
        raise UserError(
            f"generation_kwargs.max_gen_toks: must be at least 1 and below the window of {window} tokens, "
            f"but it is {count}"
        )
    if not all(isinstance(stop, str) for stop in until):
        raise UserError(f"generation_kwargs.until: must be text, or a list of texts, but it is {until}")
    temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
    choice = Choice(float(temperature), options.get("top_k", 0), float(options.get("top_p", 1.0)))
    try:
        choice.check()
    except UserError as error:
        raise UserError(f"generation_kwargs.{error}") from None
    return count, until, choice


class _Cache(lm_eval.api.model.CachingLM):
    """lm-eval's cache of answers. It knows a request by its text alone, so each model here has a file of its own."""

    def __init__(self, lm: lm_eval.api.model.LM, cache_db: str):
        if isinstance(lm, HarnessModel):
            cache_db = f"{cache_db.removesuffix('.db')}_{lm.answers_as()}.db"
        super().__init__(lm, cache_db)


lm_eval.api.model.CachingLM = _Cache  # which lm-eval looks up here


def _progress(what: str, unit: str, disabled: bool) -> Callable[[int, int], None]:
    """Progress on the standard error: lm-eval prints its results on the standard output."""
    return (lambda done, total: None) if disabled else show_progress(what, unit, sys.stderr)
