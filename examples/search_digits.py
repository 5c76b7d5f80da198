"""Architecture search on scikit-learn's digits, from one source in PyTorch and Keras.

The starting CNN has four 3x3 convolutions and ReLU, three of them before the first pooling. Found models
have its FLOPs at most, and are trained from nothing as it is, some times each.

python examples/search_digits.py [torch|keras] [SEEDS] [FIRST]
"""

import sys
from copy import copy
from functools import partial
from statistics import mean, stdev

import numpy as np
from sklearn.datasets import load_digits

import amanda
from amanda.tools.search import Choice, Evolution, Random, Search, SearchTool

KNOWN, BATCH, RATE, EPOCHS, FINALS = 900, 32, 0.01, 20, 8  # images that are not for the test; trainings
FOLDS, TRIALS, BEST, AGAIN = 4, 32, 4, 3  # how architectures are validated
RUNS, SEARCHED = 4, 10  # of DARTS, and epochs of each
CHOICES = [
    Choice(["keep", "skip", "conv1", "conv5", "conv3g2", "conv5g2", "conv5g4"], type="conv2d"),
    Choice(["keep", "tanh", "gelu", "silu"], type="relu", shared=True),
]
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% quantile of Student's t, by the number of seeds


class Torch:
    """The starting CNN, and a step of training, in PyTorch."""

    def __init__(self, seed):
        import torch
        from torch import nn

        self.torch, conv = torch, {"kernel_size": 3, "padding": 1}
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, **conv), nn.ReLU(), nn.Conv2d(4, 4, **conv, bias=False), nn.ReLU(),
            nn.Conv2d(4, 4, **conv, bias=False), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, **conv), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def tensor(self, images):
        return self.torch.as_tensor(images[:, None])

    def trainer(self, parameters, alone=False):
        """Return a function that makes a step on a batch with an optimizer of its own.

        alone: no tool is applied, so that a step may run as a graph.
        """
        optimizer = self.torch.optim.Adam(parameters, RATE)

        def step(images, labels):
            optimizer.zero_grad()
            scores = self.model(self.tensor(images))
            self.torch.nn.functional.cross_entropy(scores, self.torch.as_tensor(labels)).backward()
            optimizer.step()

        return step

    def weights(self):
        return list(self.model.parameters())

    def scores(self, images):
        with self.torch.no_grad():
            return self.model(self.tensor(images)).numpy()

    def renewed(self, seed):
        """Draw the weights anew."""
        self.torch.manual_seed(seed)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


class Keras:
    """The same in Keras."""

    def __init__(self, seed):
        import keras
        import tensorflow

        self.keras, self.tf, layers = keras, tensorflow, keras.layers
        keras.utils.set_random_seed(seed)
        conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}
        self.model = keras.Sequential(
            [
                layers.Input((8, 8, 1)), layers.Conv2D(4, **conv), layers.Conv2D(4, use_bias=False, **conv),
                layers.Conv2D(4, use_bias=False, **conv), layers.MaxPooling2D(2), layers.Conv2D(8, **conv),
                layers.MaxPooling2D(2),
                layers.Flatten(), layers.Dense(10),
            ]
        )  # fmt: skip

    def tensor(self, images):
        return self.tf.convert_to_tensor(images[..., None])

    def trainer(self, parameters, alone=False):
        optimizer = self.keras.optimizers.Adam(RATE)
        objective = self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(images, labels):
            with self.tf.GradientTape() as tape:
                loss = objective(labels, self.model(self.tensor(images)))
            pairs = zip(tape.gradient(loss, parameters), parameters, strict=True)  # None: it was not chosen
            optimizer.apply_gradients(
                [(self.tf.zeros_like(one) if gradient is None else gradient, one) for gradient, one in pairs]
            )

        if not alone:
            return step
        optimizer.build(parameters)
        graph = self.tf.function(step)
        return lambda *batch: graph(*map(self.tf.constant, batch))

    def weights(self):
        return list(self.model.trainable_variables)

    def scores(self, images):
        return self.model(self.tensor(images)).numpy()

    def renewed(self, seed):
        self.keras.utils.set_random_seed(seed)
        self.model = self.keras.models.clone_model(self.model)


def split(seed):
    """Return images and labels to train and choose architectures on, and to test on."""
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    images, labels = (found.images[order] / 16).astype(np.float32), found.target[order]
    return [(images[part], labels[part]) for part in (slice(KNOWN), slice(KNOWN, None))]


def fold(known, number):
    """Return what is left of the images when a part is held out, and that part."""
    parts = np.random.default_rng(number // FOLDS).permutation(len(known[1])) % FOLDS
    held = parts == number % FOLDS
    return [part[~held] for part in known], [part[held] for part in known]


def batches(data, epochs, seed):
    images, labels = data
    numbers = np.random.default_rng(seed)
    for _ in range(epochs):
        order = numbers.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield images[order[start : start + BATCH]], labels[order[start : start + BATCH]]


def accuracy(net, data):
    return float((net.scores(data[0]).argmax(1) == data[1]).mean())


def trained(net, data, seed):
    step = net.trainer(net.weights(), alone=True)
    for batch in batches(data, EPOCHS, seed):
        step(*batch)
    return net


def validated(net, tool, known, folds):
    """Return the mean accuracy of the present architecture, trained from nothing, on parts held out."""
    accuracies = []
    with amanda.disabled():
        for number in folds:
            train, held_out = fold(known, number)
            accuracies.append(accuracy(trained(finalized(net, tool, number), train, number), held_out))
    return mean(accuracies)


def best(net, tool, known, architectures):
    """Make the best of some architectures the tool's, by more trainings than chose them."""
    scores = []
    for tool.architecture in architectures:
        scores.append(validated(net, tool, known, range(FOLDS, FOLDS * (1 + AGAIN))))
    tool.architecture = architectures[int(np.argmax(scores))]
    return net, tool


def darts(kind, known, seed, trials):
    """Learn mixture weights on images that are held out, and the other weights on the rest.

    The best of some runs is chosen by validation, as Liu et al. 2019 do.
    """
    found = []
    for run in range(RUNS):
        net, tool = prepared(kind, known, seed + 100 * run, mixture=True)
        train, held_out = fold(known, run)
        weights, alphas = net.trainer(net.weights() + list(tool.weights())), net.trainer(list(tool.alphas()))
        with amanda.apply(tool):
            pairs = zip(batches(train, SEARCHED, run), batches(held_out, 4 * SEARCHED, run), strict=False)
            for batch, other in pairs:
                weights(*batch)
                alphas(*other)
        found.append(list(tool.settle(limits={"flops": tool.flops(first(tool))}).values()))
    return best(net, tool, known, [dict(zip(tool.space, labels, strict=True)) for labels in found])


class FromStart:
    """A controller that has the unmodified model tried first."""

    def __init__(self, controller):
        self._controller, self.tell, self._asked = controller, controller.tell, False

    def ask(self, space, numbers):
        if self._asked:
            return self._controller.ask(space, numbers)
        self._asked = True
        return {name: labels[0] for name, labels in space.items()}


def sampled(make):
    """Train each architecture from nothing, several times; the best by validation are validated again."""

    def search(kind, known, seed, trials):
        net, tool = prepared(kind, known, seed)
        limits = {"flops": tool.flops(first(tool))}
        measure = partial(validated, net, tool, known, range(FOLDS))
        made = Search(tool, measure, FromStart(make()), limits=limits, seed=seed, progress=False)
        ranked = sorted(made.run(trials=trials).trials, key=lambda one: one.metric, reverse=True)
        return best(net, tool, known, [one.architecture for one in ranked[:BEST]])

    return search


def prepared(kind, known, seed, mixture=False):
    net, tool = kind(seed), SearchTool(CHOICES, mixture=mixture, seed=seed)
    tool.prepare(net.model, net.tensor(known[0][:1]))
    return net, tool


def finalized(net, tool, seed):
    """Return the network of the present architecture, with new weights."""
    made = copy(net)
    made.model = tool.finalize(net.model)
    made.renewed(seed)
    return made


def first(tool):
    return {name: labels[0] for name, labels in tool.space.items()}


METHODS = {"darts": darts, "evolution": sampled(lambda: Evolution(8, 4)), "random": sampled(Random)}


def compare(kind, seed, methods=METHODS, trials=TRIALS, finals=FINALS):
    """Return the accuracy on the test set, and FLOPs, of the starting CNN and what each method finds.

    finals: how often each is trained from nothing; accuracies are means.
    """
    known, test = split(seed)

    def tested(make):
        return mean(accuracy(trained(make(number), known, number), test) for number in range(finals))

    _, tool = prepared(kind, known, seed)
    found = {"start": (tested(kind), tool.flops(first(tool)), first(tool))}
    for method, search in methods.items():
        net, tool = search(kind, known, seed, trials)
        found[method] = tested(partial(finalized, net, tool)), tool.flops(), tool.architecture
    return found


def main(name="torch", seeds="3", first="0"):
    numbers = range(int(first), int(first) + int(seeds))
    runs = []
    for seed in numbers:
        runs.append(compare({"torch": Torch, "keras": Keras}[name], seed))
        for method, (score, flops, architecture) in runs[-1].items():
            told = " ".join(architecture.values())
            print(f"seed {seed} {method:10} {100 * score:6.2f}%  {flops:,.0f} FLOPs: {told}", flush=True)
    print(f"{name}: accuracy on 897 images, over {seeds} seeds; gain over the start with its 95% interval")
    for method in runs[0]:
        values = [run[method][0] for run in runs]
        gains = [100 * (run[method][0] - run["start"][0]) for run in runs]
        margin = STUDENT[len(runs)] * stdev(gains) / len(runs) ** 0.5 if len(runs) in STUDENT else 0.0
        flops = max(run[method][1] for run in runs)
        print(f"{method:10} {100 * mean(values):6.2f}%  {mean(gains):+6.2f} +- {margin:.2f} points"
              f"  at most {flops:,.0f} FLOPs")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:4])
