"""SavedModels: a copy of the folder gets edited functions; variables, assets and signatures stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from amanda.backend import Artefact, Inlining, Namespace, check_private_names, digest
from amanda.errors import ArtefactError
from amanda.files import file_beside
from tensorflow.core.framework import function_pb2, graph_pb2
from tensorflow.python.checkpoint import checkpoint_options
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.saved_model import fingerprinting_utils, load, load_options, loader_impl

from ._requirements import NEWEST_TESTED, PRIVATE_NAMES
from .graph import (
    GraphTensorOps,
    RuntimeFunction,
    TensorFlowRewriting,
    edited_definition,
    function_body,
    rewrite,
)

_MODEL, _KERAS, _FINGERPRINT = "saved_model.pb", "keras_metadata.pb", "fingerprint.pb"
ABOUT = Path("assets.extra", "amanda.json")


class SavedModelFolder(Artefact):
    """A folder that `tf.saved_model.save` or a Keras model's `export` has written.

    The edited functions have the names of the original ones. Variables, assets, signatures and the graph of
    objects are kept. Creation loads the variables; raises ArtefactError where TensorFlow cannot.
    """

    api = 2
    kind = "SavedModel"

    def __init__(self, path: Path) -> None:
        check_private_names(PRIVATE_NAMES["saved_model"], "a SavedModel", "tensorflow", NEWEST_TESTED)
        _check_files(path)
        self._path = path
        self._file = _read(path)
        # FunctionDefs by name: edited functions of the file, and edited copies that these call.
        self._edited_by_name: dict[str, Any] = {}
        self._added_by_name: dict[str, Any] = {}
        try:
            self._library = FunctionLibrary(self._file.meta_graphs[0].graph_def)
            self._objects = LoadedObjects(self._file, path)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ArtefactError(f"{path} cannot be loaded by TensorFlow: {reason}") from error

    def instrument(self, inlining: Inlining) -> None:
        """Edit each function that an object of the SavedModel has, except those that save and restore.

        Drops earlier edits.  Records that Keras' metadata, if any, are left out.
        """
        self._edited_by_name, self._added_by_name = {}, {}
        for name in self._function_names():
            self._edit(name, inlining)
        _reuse_equal_functions(self._edited_by_name, self._added_by_name)
        if (self._path / _KERAS).exists():
            inlining.record_uninstrumented(
                _KERAS, "is left out: Keras would make layers anew by it, without routines"
            )

    def _function_names(self) -> Iterator[str]:
        """Yield the names of the functions, without those that save and restore."""
        objects = self._file.meta_graphs[0].object_graph_def
        saving_names: set[str] = set()
        for node in objects.nodes:
            for saveable in node.saveable_objects.values():
                for node_index in (saveable.save_function, saveable.restore_function):
                    saving_names.update(_concrete_names(objects.nodes[node_index]))
        return (name for name in sorted(objects.concrete_functions) if name not in saving_names)

    def _edit(self, name: str, inlining: Inlining) -> None:
        """Rewrite a function and those that it calls; collect the edited definitions, if there are any.

        Raises ArtefactError for a function that the file lacks.
        """
        function = self._library.find(name)
        if function is None:
            raise ArtefactError(f"{self._path} has an object with a function {name}, which is not in it")
        # `context.is_static()` reads the last tag: ops of a file have no execution while tools look at them.
        namespace = Namespace(f"tensorflow/{tf.__version__}/function/static")
        rewriting = TensorFlowRewriting(
            analysis=inlining.analysis(GraphTensorOps()),
            namespace=namespace,
            is_for_file=True,
            find_function=self._library.find,
        )
        # The captured tensors are the last arguments.
        captured_inputs = self._objects.captured_inputs(name)
        first_position = len(function.arguments) - len(captured_inputs)
        read_argument = _argument_lookup(captured_inputs, first_position)
        body = function_body(function, digest("saved_model", name), rewriting, read_argument)
        rewritten = rewrite(body, rewriting)
        rewriting.analysis.release_symbols()
        inlining.record_rewriting(rewriting)
        if rewritten.is_changed:
            self._edited_by_name[name] = edited_definition(function.definition, rewritten)
            self._added_by_name.update(
                {definition.signature.name: definition for definition in rewriting.library}
            )

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write a copy of the folder with the edited functions, and with TensorFlow's fingerprint of them.

        about: a description of the tools, which is added to the file at `ABOUT`.
        Raises ArtefactError for a model that protocol buffers cannot hold.
        """
        # The model and its fingerprint are written below. Keras' metadata are left out: Keras would make
        # layers by them, without routines.
        shutil.copytree(self._path, path, ignore=_rewritten_files(self._path))
        model = self._edited_model()
        _append_description(path / ABOUT, about)
        try:
            (path / _MODEL).write_bytes(model.SerializeToString(deterministic=True))
        except Exception as error:
            # Protocol buffers end at 2 GB, and the type of the error depends on their version.
            raise ArtefactError(f"{path.name} cannot be written as {_MODEL}: {error}") from error
        if (self._path / _FINGERPRINT).exists():
            fingerprinting_utils.write_fingerprint(str(path))

    def _edited_model(self) -> Any:
        """Return a copy of the SavedModel's protocol buffer with the edited functions."""
        model = type(self._file)()
        model.CopyFrom(self._file)
        library = model.meta_graphs[0].graph_def.library
        for definition in library.function:
            name = definition.signature.name
            if name in self._edited_by_name:
                definition.CopyFrom(self._edited_by_name[name])
                definition.signature.name = name
        # The name of an added function tells its content, so an equal name is an equal function.
        present_names = {definition.signature.name for definition in library.function}
        library.function.extend(
            added_definition
            for name, added_definition in self._added_by_name.items()
            if name not in present_names
        )
        return model


def _append_description(path: Path, about: Mapping[str, Any]) -> None:
    """Append a description of the tools to the file that lists those of earlier copies."""
    earlier_descriptions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{json.dumps([*earlier_descriptions, about], indent=1)}\n", encoding="utf-8")


def _check_files(path: Path) -> None:
    """Raise ArtefactError for a link that leads out of the folder; a copy would contain the linked file."""
    for folder, _, names in os.walk(path, followlinks=True):
        inner = Path(folder).relative_to(path)
        for name in names:
            file_beside(path / _MODEL, str(inner / name), f"parts of {path}")


def _read(path: Path) -> Any:
    """Read a SavedModel; raise ArtefactError for a broken one, or one of TensorFlow 1."""
    try:
        saved_model = loader_impl.parse_saved_model(str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"{path} is no SavedModel that can be read: {error}") from error
    # SavedModels of TensorFlow 1 have a graph, but no functions that could be edited.
    if len(saved_model.meta_graphs) != 1 or not saved_model.meta_graphs[0].HasField("object_graph_def"):
        raise ArtefactError(
            f"{path} is of TensorFlow 1, a graph without functions: load it and save it as one of TensorFlow "
            "2, m = tf.saved_model.load(path); tf.saved_model.save(m, other, m.signatures)"
        )
    return saved_model


def _concrete_names(node: Any) -> Sequence[str]:
    """Return the names of the concrete functions of an object, which is one or has several."""
    if node.HasField("bare_concrete_function"):
        return [node.bare_concrete_function.concrete_function_name]
    return list(node.function.concrete_functions)


def _argument_lookup(captured: Sequence[Any], first: int) -> Callable[[int], Any]:
    """Return a lookup of the present value of an argument; None for one that a caller passes.

    captured: tensors of the last arguments.  first: position of the first of these.
    """
    return lambda position: captured[position - first] if position >= first else None


def _reuse_equal_functions(edited_by_name: Mapping[str, Any], added_by_name: dict[str, Any]) -> None:
    """Drop added copies with the content of an edited function of the file, which their callers call then."""
    edited_name_by_content = {
        _content_without_name(definition): name for name, definition in edited_by_name.items()
    }
    edited_name_by_added = {}
    for name, definition in added_by_name.items():
        edited_name = edited_name_by_content.get(_content_without_name(definition))
        if edited_name is not None:
            edited_name_by_added[name] = edited_name
    for name in edited_name_by_added:
        del added_by_name[name]
    for definition in (*edited_by_name.values(), *added_by_name.values()):
        for node in definition.node_def:
            for value in node.attr.values():
                for reference in [value.func] if value.HasField("func") else value.list.func:
                    reference.name = edited_name_by_added.get(reference.name, reference.name)


def _content_without_name(definition: Any) -> bytes:
    """Return a function's definition as bytes, equal for functions that differ in their names alone."""
    copy = type(definition)()
    copy.CopyFrom(definition)
    copy.signature.name = ""
    content: bytes = copy.SerializeToString(deterministic=True)
    return content


def _rewritten_files(root: Path) -> Callable[[str, list[str]], list[str]]:
    """Return a function for `shutil.copytree` that leaves out the files which are written anew."""
    rewritten_names = (_MODEL, _KERAS, _FINGERPRINT)
    return lambda folder, names: [name for name in names if name in rewritten_names and Path(folder) == root]


class FunctionLibrary:
    """The functions of a SavedModel by name, each with a graph in which no other function is inlined."""

    def __init__(self, graph: graph_pb2.GraphDef) -> None:
        self._definitions: Mapping[str, Any] = {
            definition.signature.name: definition for definition in graph.library.function
        }
        self._graphs: dict[str, Any] = {}
        self._holder = tf.Graph()
        with self._holder.as_default():
            empty_graph_def = graph_pb2.GraphDef(versions=graph.versions, library=graph.library)
            # The import registers the functions with this graph, in which calls of them are looked up.
            tf.graph_util.import_graph_def(empty_graph_def, name="")

    def find(self, name: str) -> RuntimeFunction | None:
        """Return a function with a copy of its definition, which may be edited; None for an unknown name."""
        if name not in self._definitions:
            return None
        definition = function_pb2.FunctionDef()
        definition.CopyFrom(self._definitions[name])
        # Each graph is created once, since a function may be called at many places.
        if name not in self._graphs:
            with self._holder.as_default():
                self._graphs[name] = function_def_to_graph.function_def_to_graph(definition)
        return RuntimeFunction(definition, self._graphs[name])


class LoadedObjects:
    """The objects of a SavedModel, loaded so that variables have values."""

    def __init__(self, saved_model: Any, path: Path) -> None:
        private_copy = type(saved_model)()
        private_copy.CopyFrom(saved_model)  # the loader renames functions in it
        # Loaded variables must not become part of a graph that the caller is building.
        with ops.init_scope():
            self._loader = load.Loader(
                private_copy.meta_graphs[0].object_graph_def, private_copy, str(path),
                checkpoint_options.CheckpointOptions(), load_options.LoadOptions(), None,
            )  # fmt: skip

    def captured_inputs(self, function: str) -> list[Any]:
        """Return the tensors that a function captures, such as handles of variables."""
        return list(self._loader._concrete_functions[function].captured_inputs)
