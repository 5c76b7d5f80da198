"""Parts that several drivers share: operators by name, maps of tensors, names of a framework, and more."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

import amanda
from amanda.backend import (
    EagerDriver,
    ImmutableTensorOps,
    Operation,
    Patches,
    SignatureCall,
    TensorMap,
    check_private_names,
    code_within,
    complex_error,
    digest,
    dtype_error,
    hide_ops,
    lazy_getattr,
    missing_names,
    path_of_call,
    place_by_path,
    report_unseen,
    shape_error,
    type_as_path,
)
from amanda.errors import DriverError, RoutineError
from amanda.testing import attached, fake
from amanda.testing._fake_driver import FakeDriver


class Other(Operation):
    """An operator of another class."""


def test_an_operation_equals_another_of_its_class_name_and_key() -> None:
    operation = Operation("conv", 1)
    assert operation == Operation("conv", 1)
    assert hash(operation) == hash(Operation("conv", 1))
    assert operation not in (Operation("conv", 2), Operation("conv"), Other("conv", 1), "conv")
    assert (str(operation), repr(operation), operation.__name__) == ("conv", "<conv>", "conv")
    assert pickle.loads(pickle.dumps(operation)) == copy.deepcopy(operation) == operation


def test_names_that_are_not_there_are_lacking() -> None:
    absent = ["json:dumped", "json:JSONDecoder.encoded", "no_module_of_this_name:dumps"]
    assert missing_names(["json:dumps", absent[0], "json:JSONDecoder.decode", *absent[1:]]) == absent


@pytest.mark.parametrize(
    ("newest_tested", "fix"),
    [
        ("1.2", r'up to 1\.2: pip install "json==1\.2\.\*", or a newer driver'),
        ("", "an earlier release, or a newer driver"),
    ],
)
def test_the_error_of_a_driver_names_what_its_framework_lacks(newest_tested: str, fix: str) -> None:
    check_private_names(["json:dumps"], "graph mode", "json", newest_tested)
    with pytest.raises(DriverError, match=rf"json .* lacks json\.dumped, .*graph mode cannot .*{fix}"):
        check_private_names(["json:dumps", "json:dumped"], "graph mode", "json", newest_tested)


def test_a_name_of_a_package_is_imported_at_its_first_use() -> None:
    import_name = lazy_getattr("json", {"JSONDecoder": "decoder"})
    assert import_name("JSONDecoder") is __import__("json").JSONDecoder
    with pytest.raises(AttributeError, match="module 'json' has no attribute 'JSONPrinter'"):
        import_name("JSONPrinter")


def test_a_module_has_the_path_of_the_calls_that_lead_to_it() -> None:
    paths = {("model", "block"): "blocks.0", ("block", "dense"): "dense", ("block", "wrapper"): ""}
    calls = ["model", "block", "wrapper", "wrapper"]
    assert path_of_call(calls, lambda *pair: paths[pair]) == "blocks.0"
    assert path_of_call(["model", "block", "dense"], lambda *pair: paths[pair]) == "blocks.0.dense"
    assert path_of_call([], lambda *pair: paths[pair]) == ""


def test_a_module_that_its_caller_does_not_hold_has_its_type_as_path() -> None:
    place = place_by_path(lambda outer, inner: outer.get(inner) or type_as_path(inner))
    assert place({"inner": "layers.1"}, "inner") == (digest("layers.1"), True)
    assert place({}, "inner") == (digest("(str)"), False)


@pytest.mark.parametrize("result", [[1, 2], (1, 2), fake.Halves(1, 2), 1, None])
def test_a_result_is_flattened_and_formed_again(result: Any) -> None:
    driver: Any = None
    values, form = EagerDriver.flatten(driver, result)
    assert values == ([] if result is None else [1] if result == 1 else [1, 2])
    assert form(values) == result
    assert type(form(values)) is type(result)


def test_errors_name_the_value_and_the_original() -> None:
    errors = shape_error((2,), (3,)), dtype_error("int8", "half"), complex_error("complex64", "half")
    starts = "shape (2,) where shape (3,)", "int8 where half", "complex64 where half"
    for error, start in zip(errors, starts, strict=True):
        assert str(error).startswith(f"a routine returned {start} was given; ")


def test_what_tools_do_not_see_is_reported_to_the_scopes_in_force() -> None:
    report_unseen("a program", "no scope is open")
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    x = fake.tensor([1.0])

    def program(x: Any) -> Any:
        return fake.relu(x)

    entry = "inside of a program", "it is compiled"
    with attached(FakeDriver), amanda.apply(tool) as scope:
        assert hide_ops(program, lambda x: entry)(x).numbers == [1.0]
        assert hide_ops(program)(x).numbers == [1.0]
        report_unseen("a program", "it is opaque", "model.py:3")
        assert names == []
        program(x)
    assert names == ["relu"]
    assert scope.report == [(*entry, ""), ("a program", "it is opaque", "model.py:3")]


def test_stubs_are_removed_with_the_attributes() -> None:
    calls: list[str] = []

    class Stub:
        """A site that notes what happens to it."""

        def place(self) -> None:
            calls.append("place")

        def remove(self) -> None:
            calls.append("remove")

    patches = Patches()
    sites: Any = [Stub(), Stub()]
    patches.place_stubs(sites)
    assert calls == ["place", "place"]
    patches.restore()
    patches.restore()
    assert calls == ["place", "place", "remove", "remove"]


@pytest.mark.parametrize("has_hook", [True, False])
def test_subclasses_that_a_program_makes_are_followed_until_the_end(has_hook: bool) -> None:
    class Base:
        """A class of modules, with or without a hook of its own."""

    hooked: list[str] = []
    if has_hook:
        Base.__init_subclass__ = classmethod(lambda kind: hooked.append(kind.__name__))  # type: ignore
    patches, changed = Patches(), []
    patches.on_new_subclass(Base, lambda kind: changed.append(kind.__name__))
    type("Inner", (type("Outer", (Base,), {}),), {})
    patches.restore()
    type("Later", (Base,), {})
    assert changed == ["Outer", "Inner"]
    assert hooked == (["Outer", "Inner", "Later"] if has_hook else [])


def test_a_map_of_tensors_keeps_none_of_them() -> None:
    tensor_map: TensorMap[str] = TensorMap()
    first, second = (fake.tensor([1.0]) for _ in range(2))
    tensor_map[first] = "first"
    assert (tensor_map.get(first), tensor_map.get(second)) == ("first", None)
    tensor_map[first] = "second"
    assert tensor_map.get(first) == "second"
    del first
    gc.collect()
    assert not tensor_map._entries


def test_a_tensor_that_nothing_writes_into_refuses_a_value() -> None:
    class Ops(ImmutableTensorOps):
        """Numbers."""

        def is_tensor(self, value: Any) -> bool:
            return isinstance(value, float)

        def signature(self, inputs: Any) -> Any:
            return ()

        def shapes(self, inputs: Any) -> Any:
            return ()

        def straight_through(self, original: Any, value: Any) -> Any:
            return value

    ops, value = Ops(), 1.0
    with ops.without_autodiff(), pytest.raises(RoutineError, match="a float cannot be written into"):
        ops.write(value, 2.0, True)
    assert (ops.version(value), ops.detach_value(value), ops.differentiable_copy(value)) == (
        None,
        value,
        value,
    )


def test_code_within_a_function_is_found_at_any_depth() -> None:
    def enclosing() -> Any:
        def middle() -> Any:
            def inner() -> None:
                """Return None."""

            return inner

        return middle

    assert code_within(enclosing, "inner") is enclosing()().__code__
    with pytest.raises(DriverError, match=r"enclosing defines no function outer"):
        code_within(enclosing, "outer")


def test_a_call_keeps_the_form_of_its_arguments() -> None:
    forms: list[Any] = []

    def operator(x: Any, /, y: Any = 0, *rest: Any, axis: Any = None, out: Any = None, **more: Any) -> None:
        """Take arguments of each kind."""

    class FrameworkCall(SignatureCall):
        keywords = ("flag",)

    driver = FakeDriver()
    site = driver.site(lambda *args, **kwargs: forms.append((args, kwargs)), operator, "operator")
    kwargs = {"axis": 1, "flag": True, "name": "n"}
    call = FrameworkCall(driver, site, (fake.tensor([1.0]), 2, 3), kwargs, operator)
    assert list(call.names) == ["x", "y", "rest", "axis", "more"]
    assert call.attributes() == {"y": 2, "rest": (3,), "axis": 1, "more": {"name": "n"}}
    call.invoke(["new", 4, (5, 6), 7, {"name": "other"}])
    assert forms == [(("new", 4, 5, 6), {"axis": 7, "flag": True, "name": "other"})]
    assert not call.target_positions
    written = SignatureCall(driver, site, (1,), {"out": fake.tensor([1.0])}, operator)
    assert (written.written_positions, written.target_positions) == ([1], [1])
