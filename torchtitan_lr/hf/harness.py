# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tasks of EleutherAI's lm-evaluation-harness on a checkpoint or an export.

The harness is the extra ``eval``; this module is imported for ``--tasks`` only.
"""

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # read on import; results alone are printed

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.loading import load_for_inference
from torchtitan_lr.hf.scoring import Pair, score_continuations
from torchtitan_lr.inference.completion import Settings, complete_batch
from torchtitan_lr.inference.decode import Sampling
from torchtitan_lr.models.llama import LlamaModel

MAX_NEW_TOKENS = 256
"""Tokens that a task without a limit of its own generates, as in the harness' own models."""


BOOTSTRAPS = 1000
"""Samples of the standard errors that have no formula."""


class HarnessModel(TemplateLM):
    """This package's models as the harness calls them.

    Every text begins with BOS, as every document of training does. What is longer than the trained
    window loses its beginning.

    Args:
        model: The model, on one device.
        tokenizer: Its tokenizer.
        batch_size: Requests that are computed together.
    """

    def __init__(self, model: LlamaModel, tokenizer: Any, batch_size: int) -> None:
        super().__init__()
        self.model = model
        # `tokenizer` is what the base class reads chat templates from, in transformers' way.
        self._encoder = tokenizer
        self.batch_size = batch_size
        self.max_length: int = model.model_args.max_seq_len

    @property
    def eot_token_id(self) -> int:
        """EOS, else BOS; one of them begins a text without a context."""
        found: int | None = self._encoder.eos_id
        found = self._encoder.bos_id if found is None else found
        if found is None:
            raise ConfigError("model.hf_assets_path", "no BOS and no EOS", "one of them, for tasks")
        return found

    @property
    def prefix_token_id(self) -> int:
        """BOS, else EOS: the context of a text without one."""
        bos: int | None = self._encoder.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, with BOS unless ``add_special_tokens`` is False."""
        wanted = add_special_tokens is not False
        ids: list[int] = self._encoder.encode(string, add_bos=wanted, special=True)
        return ids

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Score continuations: requests with ``args = (context, continuation)``.

        Returns:
            Log-likelihood in nats, and whether it is the greedy continuation, by request.
        """
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        scores = score_continuations(self.model, pairs, self.batch_size)
        for (texts, *_), result in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[float]:
        """Score whole texts, each token once, BOS excepted, with as much context as fits.

        Returns:
            Log-likelihood in nats by request.
        """
        found = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [Pair(*make_disjoint_window(window)) for window in windows]
            scores = score_continuations(self.model, pairs, self.batch_size)
            found.append(sum(log_likelihood for log_likelihood, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Continue texts (``args = (context, options)``) to a stop string, EOS or a length.

        Returns:
            The continuations by request.

        Raises:
            ConfigError: The new tokens alone fill the trained window.
        """
        found: dict[int, str] = {}
        rows = [(index, *request.args) for index, request in enumerate(requests)]
        # Only equal options are sampled together.
        for options in {repr(row[2]): row[2] for row in rows}.values():
            same = [row for row in rows if row[2] == options]
            for start in range(0, len(same), self.batch_size):
                batch = same[start : start + self.batch_size]
                texts = self._continue([context for _, context, _ in batch], options)
                for (index, context, _), text in zip(batch, texts, strict=True):
                    found[index] = text
                    self.cache_hook.add_partial("generate_until", (context, options), text)
        return [found[index] for index in range(len(rows))]

    def _continue(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        limit = _limit(options)
        room = self.max_length - limit
        if limit < 1 or room < 1:
            want = f"from 1 to {self.max_length - 1}: the trained window is {self.max_length}"
            raise ConfigError("max_gen_toks", limit, want)
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        until = options.get("until") or []
        stops = [text for text in ([until] if isinstance(until, str) else until) if text]
        settings = Settings(sampling=_sampling(options), stops=stops, stop_ids=[self.eot_token_id])
        rows = [("", prompt, limit, seed) for seed, prompt in enumerate(prompts)]
        return [done.text for done in complete_batch(self.model, self._encoder, rows, settings)]


def _limit(options: dict[str, Any]) -> int:
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    return int(next((options[name] for name in names if name in options), MAX_NEW_TOKENS))


def _sampling(options: dict[str, Any]) -> Sampling:
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0):
        return Sampling(temperature=0.0)
    top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
    return Sampling(temperature or 1.0, top_k, top_p)


def evaluate_tasks(options: argparse.Namespace) -> dict[str, Any]:
    """Run tasks on a checkpoint or an export.

    Returns:
        ``tasks``, the harness' results by task and metric, and what was evaluated.

    Raises:
        ConfigError: A task, the model or the device cannot be used.
    """
    logging.getLogger("lm_eval").setLevel("ERROR")
    names = options.tasks
    manager = find_tasks(names, options.task_path)
    try:
        loaded = list(manager.load(names)["tasks"].values())
    # Task files and data sets raise any exception.
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        want = f"tasks whose files and data can be read ({why[:200]})"
        raise ConfigError("--tasks", ",".join(names), want) from error
    where = options.checkpoint, options.config, options.device
    model, tokenizer = load_for_inference(*where, allow_unverified=options.allow_unverified)
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # the harness' remarks
        results = lm_eval.simple_evaluate(
            model=HarnessModel(model, tokenizer, options.batch_size),
            tasks=loaded,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.documents or None,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
        )
    return {
        "checkpoint": str(options.checkpoint),
        "tasks": {name: _metrics(values) for name, values in results["results"].items()},
        "samples": {name: count["effective"] for name, count in results["n-samples"].items()},
        "lm_eval": version("lm-eval"),
        "seconds": time.perf_counter() - started,
    }


def find_tasks(names: Sequence[str], folder: Path | None) -> Any:
    """Return the harness' task manager that knows the tasks.

    The harness' own tasks are thousands of files, which are read only if a name is in no folder.

    Args:
        names: The tasks.
        folder: Task files of the user; None for none.

    Raises:
        ConfigError: A task is unknown.
    """
    folders = [str(folder)] if folder else []
    for defaults in (False, True):
        manager = TaskManager(include_path=folders, include_defaults=defaults)
        unknown = [name for name in names if name not in manager.all_tasks]
        if not unknown:
            return manager
    want = "a task of the harness" + (f" or of the files below {folder}" if folder else "")
    raise ConfigError("--tasks", unknown[0], want)


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return numbers by metric, without the name of the harness' filter where it is none."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and "," in key
    }
