"""What people do with models in a scope: copies, generation, shared layers, checkpoints, hooks."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amanda


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def test_models_are_copied_pickled_and_saved_in_a_scope(harmless: amanda.Tool) -> None:
    net = network()
    with amanda.apply(harmless):
        net(X).sum().backward()
        copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        stream = io.BytesIO()
        torch.save(net.state_dict(), stream)
        stream.seek(0)
        loaded = network()
        loaded.load_state_dict(torch.load(stream))
        outputs = [model(X) for model in (net, copied, pickled, loaded)]
    assert all(torch.equal(outputs[0], output) for output in outputs)
    assert list(net.state_dict()) == list(network().state_dict())


def test_a_copied_or_pickled_tool_keeps_an_account_of_its_own(op_log: Any) -> None:
    net = network()
    with amanda.apply(op_log):
        net(X)
    copied = copy.deepcopy(op_log)
    with amanda.apply(copied):
        net(X)
    assert (len(op_log.names), len(copied.names)) == (3, 6)


def test_generation_with_a_cache_has_the_ids_of_the_step_before(op_log: Any, transformers: Any) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.randint(0, 50, (1, 4))

    def generate(tokens: int) -> torch.Tensor:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[no-any-return]

    bare = generate(20)
    counts = []
    with amanda.apply(op_log):
        for tokens in (3, 6, 20):
            output = generate(tokens)
            counts.append(len(set(op_log.ids)))
    assert torch.equal(output, bare)
    assert counts[0] == counts[1] == counts[2]


def test_text_is_generated_on_a_thread_in_the_scope(op_log: Any, transformers: Any) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model, prompt = transformers.LlamaForCausalLM(config).eval(), torch.tensor([[1, 5, 9]])

    class Words:
        """A tokenizer, as far as a streamer asks."""

        def decode(self, tokens: Any, **_: Any) -> str:
            return "".join(f"{int(token)} " for token in tokens)

    def stream() -> list[str]:
        streamer = transformers.TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
        options = {"streamer": streamer, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        thread = threading.Thread(target=model.generate, args=(prompt,), kwargs=options)
        thread.start()
        words = "".join(streamer).split()
        thread.join()
        return words

    alone = stream()
    with amanda.apply(op_log) as scope:
        assert stream() == alone
    assert op_log.names.count("scaled_dot_product_attention") == len(alone) == 4
    assert scope.report == []


def test_the_calls_of_a_shared_layer_are_told_apart(op_log: Any, transformers: Any) -> None:
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model, tokens = transformers.AlbertModel(config).eval(), torch.randint(0, 50, (1, 4))
    with amanda.apply(op_log):
        model(tokens)
        first = op_log.ids.copy()
        model(tokens)
    assert len(set(first)) == len(first)
    assert op_log.ids == first * 2


class Checkpointed(torch.nn.Module):
    """Two layers whose activations are computed again in the backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([network()[:2], torch.nn.Linear(8, 8)])
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)) * 2, x, **self.options)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_ops_have_the_ids_of_the_first_run(op_log: Any, reentrant: bool) -> None:
    net = Checkpointed(use_reentrant=reentrant, **({} if reentrant else {"early_stop": False}))
    x = X.clone().requires_grad_()
    with amanda.apply(op_log):
        output = net(x)
        first = op_log.ids.copy()
        output.sum().backward()
    ids = [
        op_id
        for op_id, name in zip(op_log.ids, op_log.names, strict=True)
        if name in ("linear", "relu", "tanh")
    ]
    assert len(ids) == 10
    assert {*ids} <= {*first}
    assert sorted(ids) == sorted(2 * ids[:5])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_through_a_checkpoint_are_the_same(harmless: amanda.Tool, reentrant: bool) -> None:
    def gradients() -> list[torch.Tensor]:
        net = Checkpointed(use_reentrant=reentrant)
        torch.nn.init.eye_(net.layers[1].weight)  # type: ignore[arg-type]
        torch.nn.init.zeros_(net.layers[1].bias)  # type: ignore[arg-type]
        x = X.clone().requires_grad_()
        net(x).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]

    bare = gradients()
    with amanda.apply(harmless):
        for _ in range(2):
            assert all(map(torch.equal, bare, gradients()))


def test_hooks_of_the_user_run_in_their_order(harmless: amanda.Tool) -> None:
    def run() -> tuple[list[str], list[Any]]:
        log: list[str] = []

        def note(word: str) -> Callable[..., None]:
            return lambda *_: log.append(word)

        net, x = network(), X.clone().requires_grad_()
        for module in net:
            module.register_forward_pre_hook(note("forward pre"))
            module.register_forward_hook(note("forward"))
            module.register_full_backward_pre_hook(note("backward pre"))
            module.register_full_backward_hook(note("backward"))
        net[0].weight.register_hook(note("weight"))
        net[0].weight.register_post_accumulate_grad_hook(note("accumulated"))
        y = net(x)
        y.register_hook(note("output"))
        y.grad_fn.register_prehook(note("node pre"))
        y.sum().backward()
        return log, [x.grad, *(p.grad for p in net.parameters())]

    log, gradients = run()
    with amanda.apply(harmless):
        for _ in range(2):
            again, gradients_again = run()
            assert again == log
            assert all(map(torch.equal, gradients, gradients_again))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_step_the_same(harmless: amanda.Tool, kind: Any, foreach: bool) -> None:
    def trained() -> list[torch.Tensor]:
        net = network()
        optimizer = kind(net.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            net(X).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    bare = trained()
    with amanda.apply(harmless):
        assert all(map(torch.equal, bare, trained()))


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_layers_are_bit_identical(harmless: amanda.Tool, kind: Any) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = kind(4, 3, num_layers=2), X.reshape(5, 1, 4)
        output, _ = layer(x)
        output.sum().backward()
        return [output, *(p.grad for p in layer.parameters())]

    bare = run()
    with amanda.apply(harmless):
        assert all(map(torch.equal, bare, run()))
        assert all(map(torch.equal, bare, run()))


def test_lazy_modules_become_what_they_are(harmless: amanda.Tool) -> None:
    with amanda.apply(harmless):
        net = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU())
        for _ in range(2):
            net(X).sum().backward()
    assert type(net[0]) is torch.nn.Linear


def test_a_module_made_for_one_call_keeps_its_ids(op_log: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.Softmax(-1)(x) + torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())(x)

    net = Model()
    with amanda.apply(op_log):
        for _ in range(3):
            net(X)
    assert op_log.ids == op_log.ids[:4] * 3
    assert len(set(op_log.ids)) == 4
