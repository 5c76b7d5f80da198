"""Campaigns: outcomes that can be told beforehand, rates by scipy, and the same again from a seed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor, nn

from amanda.tools.inject import (
    Campaign,
    CampaignResult,
    InjectError,
    InjectResult,
    InjectTool,
    differs,
    differs_by,
    top1_changed,
    wilson,
)


def campaign(program: Any, trials: int = 20, **options: Any) -> CampaignResult:
    of_campaign = {
        name: options.pop(name) for name in ("compare", "sample", "timeout", "hang_factor") if name in options
    }
    return Campaign(InjectTool(**options), trials=trials, **of_campaign).run(program)


def test_a_fault_that_cannot_be_seen_is_masked_and_one_that_can_corrupts() -> None:
    x = torch.full((8,), -1.0)
    result = campaign(lambda: x.neg().relu() * 0, type="neg", bits=[0])
    assert result.count("masked") == 20
    result = campaign(lambda: x.neg().relu(), type="neg", bits=[0])
    assert result.count("sdc") == 20
    assert campaign(lambda: x.neg(), compare=differs_by(rtol=1e-3), bits=[0]).count("masked") == 20


def test_only_a_changed_class_is_corruption_where_that_is_asked() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0]])
    result = campaign(lambda: logits.clone(), type="clone", trials=60, field="sign", compare=top1_changed)
    for trial in result.trials:
        hits_the_largest = trial.injections[0].element == (0, 1)
        assert trial.outcome == ("sdc" if hits_the_largest else "masked")
    assert 0 < result.count("sdc") < 60


def test_nan_crash_and_hang_are_told_apart() -> None:
    table, index = torch.arange(4.0), torch.tensor([2])
    result = campaign(lambda: table.clone(), type="clone", fault="value", value=float("nan"))
    assert result.count("nan") == 20
    result = campaign(lambda: F.embedding(index.clone(), table[:, None]), type="clone", bits=[20])
    assert result.count("crash") == 20
    assert "IndexError" in result.trials[0].error

    def countdown() -> Tensor:
        remaining = torch.tensor([3.0])
        while (remaining := remaining - 1).item() != 0:
            pass
        return remaining

    result = campaign(countdown, type="sub", fault="value", value=0.5, trials=4)
    assert result.count("hang") == 4
    assert "executed more than 1,000 ops" in result.trials[0].error
    result = campaign(
        countdown, type="sub", fault="value", value=0.5, trials=1, hang_factor=None, timeout=0.2
    )
    assert "ran for more than 0.2 s" in result.trials[0].error


def test_a_program_that_swallows_the_stop_hangs_all_the_same() -> None:
    def program() -> float:
        remaining = torch.tensor([3.0])
        try:
            while (remaining := remaining - 1).item() != 0:
                pass
        except Exception:
            pass
        return 0.0

    assert campaign(program, type="sub", fault="value", value=0.5, trials=1).count("hang") == 1


def test_rates_have_the_intervals_of_scipy() -> None:
    for successes, trials in ((0, 10), (1, 10), (7, 10), (10, 10), (3, 1000)):
        reference = binomtest(successes, trials).proportion_ci(method="wilson")
        assert wilson(successes, trials) == pytest.approx((successes / trials, *reference), abs=1e-12)
    assert wilson(0, 0) == (0, 0, 1)
    result = campaign(
        lambda: torch.ones(2).clone(), type="clone", trials=30, field="sign", compare=top1_changed
    )
    assert result.rate("sdc") == wilson(result.count("sdc"), 30)
    assert result.rate("sdc", "masked").value == 1


def test_the_report_counts_by_type_module_and_bit() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), torch.rand(1, 6)
    result = campaign(lambda: model(x), trials=60)
    for key, expected in (("type", {"linear", "relu"}), ("module", {"0", "1", "2"})):
        rows = result.by(key).rows()
        assert {row[0] for row in rows} == expected
        assert sum(row[1] for row in rows) == 60
        for row in rows:
            assert sum(row[2:7]) == row[1]
            assert row[7:] == wilson(row[3], row[1])
    bits = [int(row[0]) for row in result.by("bit").rows()]
    assert bits == sorted(bits)
    assert len(bits) > 10
    for word in ("60 trials", "95 % confidence", "3 executions"):
        assert word in str(result)
    with pytest.raises(Exception, match="not color"):
        result.by("color")


def test_a_campaign_repeats_exactly_and_any_trial_of_it() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), torch.rand(2, 16)

    def program() -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    kinds: dict[str, dict[str, Any]] = {
        "ops": {}, "elements": {}, "all": {"probability": 0.02, "fault": "gaussian"},
    }  # fmt: skip
    for sample, options in kinds.items():
        tool = InjectTool(seed=9, **options)
        first = Campaign(tool, trials=15, sample=sample).run(program)  # type: ignore[arg-type]
        again = Campaign(tool, trials=25, sample=sample)  # type: ignore[arg-type]
        assert again.run(program).to_dict()["trials"][:15] == first.to_dict()["trials"]
        replayed = again.replay(program, 7)
        assert tool.result.rows() == InjectResult(first.trials[7].injections, 0, 0, {}).rows()
        is_different = differs(program().detach().numpy(), replayed.detach().numpy())
        assert is_different == (first.trials[7].outcome not in ("masked", "no_fault"))
        other_campaign = Campaign(InjectTool(seed=10, **options), trials=15, sample=sample)  # type: ignore[arg-type]
        assert other_campaign.run(program).to_dict()["trials"] != first.to_dict()["trials"]


@pytest.mark.slow
def test_trials_sample_ops_alike_or_by_their_elements() -> None:
    small, large = torch.ones(10), torch.ones(990)

    def share(sample: str) -> float:
        result = campaign(lambda: (small.neg(), large.abs()), trials=200, sample=sample, fault="zero")
        return sum(trial.injections[0].type == "neg" for trial in result.trials) / 200

    assert binomtest(round(200 * share("ops")), 200, 0.5).pvalue > 1e-3
    assert share("elements") < 0.05


def test_gradients_and_weights_have_campaigns_too() -> None:
    layer, x = nn.Linear(4, 2), torch.rand(3, 4)

    def step() -> Any:
        layer.zero_grad()
        F.cross_entropy(layer(x), torch.tensor([0, 1, 1])).backward()
        return [parameter.grad for parameter in layer.parameters()]

    result = campaign(step, target="weight_grads", bits=[30])
    assert result.count("sdc") + result.count("nan") == 20
    before = layer.weight.detach().clone()
    assert campaign(step, target="weights", type="linear").count("no_fault") == 0
    assert torch.equal(before, layer.weight)


def test_trials_without_a_fault_are_in_no_rate() -> None:
    result = campaign(lambda: torch.ones(3).clone(), type="clone", probability=0.0, sample="all")
    assert result.count("no_fault") == 20
    assert result.rows() == []
    assert result.rate("sdc") == (0, 0, 1)
    assert "No element changed" in str(result)


def test_what_cannot_be_a_campaign_is_said() -> None:
    with pytest.raises(InjectError, match="output of the program varies"):
        campaign(lambda: torch.rand(3), type="rand")
    with pytest.raises(InjectError, match=r"has a tensor for this fault.*types were neg"):
        campaign(lambda: torch.ones(3).neg(), type="conv2d")
    with pytest.raises(InjectError, match="trials is 0"):
        Campaign(InjectTool(), trials=0)
    with pytest.raises(InjectError, match="sample is 'op'"):
        Campaign(InjectTool(), sample="op")  # type: ignore[arg-type]
    with pytest.raises(InjectError, match="hang_factor is 1"):
        Campaign(InjectTool(), hang_factor=1)


def test_comparisons_look_into_every_structure() -> None:
    golden = {"a": [np.array([1.0, np.nan]), "x"]}
    assert not differs(golden, {"a": [np.array([1.0, np.nan]), "x"]})
    assert differs(golden, {"a": [np.array([1.0, 2.0]), "x"]})
    assert differs(golden, {"a": [np.array([1.0, np.nan]), "y"]})
    assert differs(golden, {"b": golden["a"]})
    assert differs(golden, [1])
    assert differs(np.zeros(2), np.zeros(3))
    assert top1_changed([np.array([1, 2])], [np.array([2, 1])])
    with pytest.raises(InjectError, match="has none"):
        top1_changed("no array", "no array")


def test_outputs_are_copies_of_every_kind_of_tensor() -> None:
    buffer = torch.zeros(3, dtype=torch.bfloat16)

    def program() -> Any:
        buffer.fill_(1).add_(0)
        return {"held": buffer, "sparse": torch.eye(2).to_sparse(), "numbers": (1, 2.5, None, "text")}

    result = campaign(program, type="add", fault="value", value=5.0, count=3)
    assert result.count("sdc") == 20


def test_a_report_goes_to_files(tmp_path) -> None:
    result = campaign(
        lambda: torch.ones(2).clone(), type="clone", fault="value", value=float("nan"), trials=3
    )
    content = json.loads(result.save(tmp_path / "campaign.json").read_text(), parse_constant=pytest.fail)
    assert content["schema"] == "amanda.inject_campaign"
    assert content["rates"]["nan"]["value"] == 1
    assert content["trials"][0]["injections"][0]["new"] == "nan"
    assert list(result.to_pandas()["nan"]) == [3]
