"""Accuracy of pruned and quantised models by tools and by hand, into docs/accuracy.md.

    python benchmarks/accuracy.py [MODEL ...] [--seeds N] [--write]

Without --write it prints the tables. With it the models are measured anew, the others of docs/accuracy.json
stay, and the page is made.
"""

import argparse
import functools
import importlib
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

from _pages import DOCS, render
from _tables import table as table_of

SEEDS = 5
MODELS = (
    "digits, CNN, PyTorch", "digits, ViT of timm, PyTorch", "digits, CNN, Keras", "digits, ViT, Keras",
    "sentences, MiniLM, PyTorch",
)  # fmt: skip


class Run(NamedTuple):
    """One method at one seed.

    tool, hand: the scores.  same: share of the weights that are bit for bit the same in the end.
    """

    method: str
    seed: int
    tool: dict[str, float]
    hand: dict[str, float]
    same: float


def study(name: str, quick: bool) -> Any:
    """Return how a model is trained and scored."""
    if "MiniLM" in name:
        from _sentences import SentencesStudy

        return SentencesStudy(steps=2, kept=20) if quick else SentencesStudy()
    digits = importlib.import_module("_digits_keras" if "Keras" in name else "_digits_torch")
    make = digits.vit if "ViT" in name else digits.Cnn if "PyTorch" in name else digits.cnn
    return digits.DigitsStudy(make, *((3, 1) if quick else ()))


def runs(name: str, seed: int, quick: bool) -> list[Run]:
    """Return every method at one seed, by a tool and by hand."""
    from _methods import METHODS, by_tool

    of, found = study(name, quick), []
    with of.running():
        dense = of.dense(seed)
        for title, method in METHODS.items():
            scores, weights = [], []
            for way in (functools.partial(by_tool, of), of.by_hand):
                score, model = way(of.fresh(dense), method, seed)
                scores.append(score)
                weights.append(of.weights(model))
            if method.kind == "qat" and of.qat == "lsq":
                title = title.replace("QAT", "QAT (LSQ)")
            found.append(Run(title, seed, *scores, same(*weights)))
    return found


def same(weights: dict[Any, Any], others: dict[Any, Any]) -> float:
    """Return the share of elements that are equal, bit for bit."""
    assert weights.keys() == others.keys()
    equal = sum(int((one == others[key]).sum()) for key, one in weights.items())
    return equal / sum(one.size for one in weights.values())


def measured(model: str, seeds: Sequence[int], quick: bool = False) -> list[Run]:
    """Return a model's runs, each seed in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        each = pool.starmap(runs, [(model, seed, quick) for seed in seeds], 1)
    return [run for found in each for run in found]


def table(found: Sequence[Run]) -> list[str]:
    """Return a row for each method: mean and standard deviation over seeds, and equality of the two ways."""
    columns = [(measure, way) for measure in found[0].tool for way in ("tool", "hand")]
    names = [f"{measure}, {way.replace('hand', 'by hand')}" for measure, way in columns]
    rows = []
    for method in dict.fromkeys(run.method for run in found):
        chosen = [run for run in found if run.method == method]
        cells = [spread([getattr(run, way)[measure] for run in chosen]) for measure, way in columns]
        equal = f"{sum(run.tool == run.hand for run in chosen)} of {len(chosen)}"
        rows.append([method, *cells, equal, f"{100 * min(run.same for run in chosen):.4g} %"])
    return table_of(["", *names, "equal scores", "equal weights"], rows, words=True).splitlines()


def spread(values: Sequence[float]) -> str:
    """Return mean and, of more than one, standard deviation in percent."""
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def page(found: dict[str, list[Run]]) -> str:
    """Return docs/accuracy.md."""
    names = ("torch", "timm", "transformers", "tensorflow-cpu", "keras", "numpy", "scipy", "scikit-learn")
    methods: dict[str, dict[str, None]] = {}
    for model, own in found.items():
        methods.setdefault(model.split(", ")[-1], {}).update(dict.fromkeys(run.method for run in own))
    absent = [model for model in MODELS if model not in found]
    for model, own in found.items():
        left = [one for one in methods[model.split(", ")[-1]] if one not in {run.method for run in own}]
        absent += [f"{model}: {', '.join(left)}"] if left else []
    return render(
        "accuracy",
        tables={f"{model[0].upper()}{model[1:]}": table(found[model]) for model in MODELS if model in found},
        seeds=" or ".join(map(str, sorted({len({run.seed for run in own}) for own in found.values()}))),
        missing="; ".join(absent),
        versions=", ".join(f"{name} {metadata.version(name)}" for name in names),
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {'; '.join(MODELS)}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="next to no training: does it run?")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.json and docs/accuracy.md")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {'; '.join(MODELS)}")
    if options.write and options.quick:
        parser.error("figures of a quick run do not belong on the page: --write or --quick")
    raw = DOCS / "accuracy.json"
    known = json.loads(raw.read_text()) if options.write and raw.exists() else {}
    found = {model: [Run(**run) for run in own] for model, own in known.items()}
    for model in options.models or MODELS:
        found[model] = measured(model, range(options.seeds), options.quick)
        print("\n".join([model, *table(found[model])]), flush=True)
        if options.write:
            written = {name: [run._asdict() for run in own] for name, own in found.items()}
            raw.write_text(json.dumps(written, indent=1) + "\n")
            (DOCS / "accuracy.md").write_text(page(found))


if __name__ == "__main__":
    main()
