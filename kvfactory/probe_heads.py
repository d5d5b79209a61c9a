"""Head scores of HeadKV for any model: `python -m kvfactory.probe_heads --model_path smollm2 --output scores.json`.

Hides sentences in a text, asks for them, and counts per query head how often its attention sits on what comes out
(`--kind retrieval`) or how much of it lies on the answer (`--kind reasoning`). Writes the published file format and a
sidecar that names the model, so that the file is never used for another one. Killed and called again, it goes on.

Exit codes: 0 done; 1 fewer than 10 trials passed; 2 refused; 75 stopped by a signal (call again to go on).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from kvfactory.attention_probe import last_row_attention, probe_plan
from kvfactory.loading import Checkpoint, check_attachable, load_model, open_checkpoint, resolve_computation
from kvfactory.probe.haystack import generated_haystack, read_haystack
from kvfactory.probe.log import TrialLog, TrialResult, write_scores
from kvfactory.probe.needles import KINDS, needles
from kvfactory.probe.scoring import (
    GATE,
    PROBE_MODES,
    RETRIEVAL_STEPS,
    answer_quality,
    ends_output,
    read_trial,
)
from kvfactory.probe.trials import Trial, TrialMaker, make_trials, spread, trials_sha256
from kvfactory.reports.files import FileLock
from kvfactory.reports.stop import STOPPED, StopSignal
from kvfactory.settings import whole_number
from kvfactory.version import __version__

MIN_TRIALS = 10
LONGEST = 10_000
QUESTION_ROOM = 300  # tokens left for needle, question and output where the model's window sets the longest text


class TooFewTrials(ValueError):
    """The probe ran and too little of it counts."""


def probe_model(
    model: PreTrainedModel,
    trials: Sequence[Trial],
    kind: str,
    mode: str,
    *,
    decode: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids)),
    quality: Callable[[str, Trial], float] | None = None,
    stop: Callable[[int], bool] = lambda token: False,
    known: dict[str, TrialResult] | None = None,
    keep: Callable[[TrialResult], None] = lambda result: None,
    stopped: Callable[[], bool] = lambda: False,
    backend: str = "sdpa",
    quiet: bool = True,
) -> dict[str, TrialResult] | None:
    """Runs the trials that are not in `known` yet.

    Args:
        decode: output ids to text.
        quality: of an output, in [0, 1]; a trial passes above 0.5. None, or mode teacher_forced: every trial passes.
        stop: whether a token ends an output.
        keep: called with each result as it comes.
        stopped: asked before each trial.

    Returns:
        Results by trial name, or None when stopped.
    """
    results = dict(known or {})
    waiting = [trial for trial in trials if trial.name not in results]
    gated = quality is not None and mode == "generate"
    interval = 0.5 if sys.stderr.isatty() else 30
    with (
        last_row_attention(model, backend) as probe,
        tqdm(total=len(trials), initial=len(trials) - len(waiting), desc=f"{kind} probe", unit="trial",
             disable=quiet, mininterval=interval) as bar,
    ):  # fmt: skip
        for trial in waiting:
            if stopped():
                return None
            reading = read_trial(model, probe, trial, kind, mode, stop)
            output = decode(reading.output)
            got = quality(output, trial) if gated else None
            result = TrialResult(trial.name, got is None or got > GATE, got, output, reading.scores.tolist())
            keep(result)
            results[trial.name] = result
            bar.set_postfix(passed=sum(r.passed for r in results.values()), refresh=False)
            bar.update()
    return results


def enough_scores(results: dict[str, TrialResult], trials: Sequence[Trial]) -> list[list[list[float]]]:
    """Passing trials x L x Hq scores, in the order of `trials`.

    Raises:
        TooFewTrials: fewer than 10 of them passed, or no head scored at all.
    """
    passed = [results[trial.name].scores for trial in trials if results[trial.name].passed]
    if len(passed) < MIN_TRIALS:
        raise TooFewTrials(
            f"only {len(passed)} of {len(trials)} probe trials passed (the model gave the hidden sentence back), and "
            f"{MIN_TRIALS} are needed for scores that mean something: use shorter texts (--max_length), or "
            "--probe_mode teacher_forced, which feeds the answer and needs none to pass"
        )
    if not any(score for trial in passed for layer in trial for score in layer):
        raise TooFewTrials("no head attended to what it was to find in any trial, so the scores rank no heads")
    return passed


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvfactory.probe_heads", description="Make the head score file that HeadKV needs."
    )
    add = parser.add_argument
    add("--model_path", required=True, help="local folder, hub id, or smollm2")
    add("--output", required=True, type=Path, help="score file to write; the sidecar and a log of trials lie beside it")
    add("--kind", choices=KINDS, default=KINDS[0], help="HeadKV-R or HeadKV-R2 (default: retrieval)")
    add("--probe_mode", choices=PROBE_MODES, default=PROBE_MODES[0],
        help="generate counts trials that the model answers; teacher_forced feeds the answer and counts all, for base "
        "and tiny models (default: generate)")  # fmt: skip
    add("--haystack_dir", metavar="PATH", help="folder of .txt files or one text file; default: generated text")
    add("--min_length", type=whole_number, default=0, metavar="N", help="tokens of the shortest text (default: 0)")
    add("--max_length", type=whole_number, metavar="N",
        help=f"tokens of the longest text (default: {LONGEST}, or what the model's window allows)")  # fmt: skip
    add("--num_lengths", type=whole_number, default=5, metavar="N", help="lengths between the two (default: 5)")
    add(
        "--num_depths",
        type=whole_number,
        default=10,
        metavar="N",
        help="places within a text, 0 to 100 %% (default: 10)",
    )
    add("--seed", type=whole_number, default=42, metavar="N", help="of the text (default: 42)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where the model runs (default: auto)")
    add("--dtype", choices=("auto", "float16", "bfloat16", "float32"), default="auto",
        help="precision (default: auto, the checkpoint's on CUDA, float32 on the CPU)")  # fmt: skip
    add("--overwrite", action="store_true", help="start anew instead of going on with what is there")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def _check_numbers(options: argparse.Namespace, trials_each: int, window: int) -> int:
    """The longest text in tokens, after checking everything that counts something."""
    for name, least in (("min_length", 0), ("num_lengths", 1), ("num_depths", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least {least}")
    planned = options.num_lengths * options.num_depths * trials_each
    if planned < MIN_TRIALS:
        raise ValueError(
            f"--num_lengths {options.num_lengths} and --num_depths {options.num_depths} make {planned} trials of the "
            f"{trials_each} needles, and {MIN_TRIALS} must pass: ask for more"
        )
    longest = min(LONGEST, window - QUESTION_ROOM) if options.max_length is None else options.max_length
    if longest < max(1, options.min_length):
        raise ValueError(f"--max_length {longest} must be at least 1 and not below --min_length {options.min_length}")
    return longest


def _check_window(trials: Sequence[Trial], window: int) -> None:
    longest = max(trials, key=lambda trial: len(trial.prompt))
    needed = len(longest.prompt) + max(RETRIEVAL_STEPS, len(longest.answer))
    if needed > window:
        raise ValueError(
            f"--max_length is too long: {longest.name.split('|')[1]} tokens of text make {needed} with question and "
            f"output, the model's window has {window}"
        )


def _model_name(checkpoint: Checkpoint) -> str:
    """The hub id, or the name of a local folder; never a path of this machine."""
    return Path(checkpoint.name).name if Path(checkpoint.name).is_dir() else checkpoint.name


def run(options: argparse.Namespace) -> int:
    """Probes and writes; the exit code.

    Raises:
        ValueError: one sentence naming the flag, the value and what is accepted.
    """
    checkpoint = open_checkpoint(options.model_path)
    computation = resolve_computation(checkpoint, options.device, options.dtype)
    config = checkpoint.config.get_text_config(decoder=True)
    window = getattr(config, "max_position_embeddings", None) or LONGEST + QUESTION_ROOM
    asked = needles(options.kind)
    longest = _check_numbers(options, len(asked), window)
    if options.haystack_dir is None:
        haystack = generated_haystack(options.seed)
    else:
        haystack = read_haystack(options.haystack_dir, options.seed)
    lengths = spread(options.min_length, longest, options.num_lengths)
    depths = spread(0, 100, options.num_depths)
    trials = list(
        {t.name: t for t in make_trials(TrialMaker(checkpoint.tokenizer, haystack), asked, lengths, depths)}.values()
    )
    _check_window(trials, window)
    check_attachable(checkpoint, [probe_plan()], computation)
    facts = checkpoint.facts()
    identity: dict[str, Any] = {
        "model": _model_name(checkpoint),
        "kind": options.kind,
        "probe_mode": options.probe_mode,
        "dtype": computation.dtype,
        "attn_implementation": computation.attn_implementation,
        "seed": options.seed,
        "lengths": lengths,
        "depths": depths,
        "needles": [needle.name for needle in asked],
        "haystack": {"source": haystack.source, "sha256": haystack.sha256},
        "trials_sha256": trials_sha256(trials),
        "revision": facts["model"]["revision"],
        "weights_sha256": facts["model"]["weights_sha256"],
        "weights_hashed": facts["model"]["weights_hashed"],
        "tokenizer_sha256": facts["tokenizer"]["sha256"],
    }
    _check_output(options)
    with FileLock(options.output), StopSignal() as signals:
        log = TrialLog(options.output, identity, fresh=options.overwrite)
        model = load_model(checkpoint, computation)
        results = probe_model(
            model, trials, options.kind, options.probe_mode,
            decode=checkpoint.tokenizer.decode,
            quality=lambda output, trial: answer_quality(options.kind, output, trial.reference),
            stop=ends_output(options.kind, checkpoint.tokenizer, _end_ids(model)),
            known=log.results, keep=log.add, stopped=lambda: signals.requested,
            backend=computation.attn_implementation, quiet=options.quiet,
        )  # fmt: skip
        if results is None:
            return STOPPED
        scores = enough_scores(results, trials)
        about = {
            **identity,
            "layers": len(scores[0]),
            "heads": len(scores[0][0]),
            "trials": len(trials),
            "passed": len(scores),
            "gate": None if options.probe_mode == "teacher_forced" else GATE,
            "device": computation.device,
            "kvfactory": __version__,
        }
        write_scores(options.output, scores, about)
    print(f"{options.output}: {len(scores)} of {len(trials)} trials, {about['layers']} x {about['heads']} heads")
    return 0


def _end_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _check_output(options: argparse.Namespace) -> None:
    """Refuses an output that cannot be written, or a finished file that no log of trials explains."""
    output: Path = options.output
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: give the score file to write")
    if output.is_file() and not options.overwrite and not Path(f"{output}.trials.jsonl").is_file():
        raise ValueError(f"--output {output} exists and has no log of trials to go on from: use --overwrite")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    try:
        return run(build_parser().parse_args(arguments))
    except ValueError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1 if isinstance(reason, TooFewTrials) else 2


if __name__ == "__main__":
    sys.exit(main())
