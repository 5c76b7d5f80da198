"""What TensorFlow's types of operations cost that have no word in the vocabulary."""

from __future__ import annotations

from math import prod

from amanda.tools.flops import _linalg
from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import matrix_product, no_cost, visits
from amanda.tools.flops._linalg import fourier

_FREE = """
    AnonymousIteratorV3 IteratorGetNext IteratorGetNextSync MakeIterator OptionalFromValue OptionalGetValue
    OptionalHasValue OptionalNone
    Assert AssignVariableOp BatchToSpaceND BroadcastArgs BroadcastGradientArgs BroadcastTo Case ConcatOffset
    Const ControlTrigger CropAndResize DeepCopy DepthToSpace DynamicPartition DynamicStitch EmptyTensorList
    EnsureShape Enter Exit ExpandDims Fill Gather GatherNd GatherV2 IdentityN Identity If InvertPermutation
    LinSpace LoopCond Merge MirrorPad MultinomialV2 NextIteration NoOp OneHot OnesLike PartitionedCall Pad
    PadV2 Placeholder PlaceholderWithDefault PreventGradient RandomStandardNormal RandomUniform
    RandomUniformInt Range Rank ReadVariableOp RemoteCall ResizeNearestNeighbor ResourceGather ReverseV2 Roll
    ScatterNd Shape ShapeN Size Snapshot SpaceToBatchND SpaceToDepth SplitV StatefulPartitionedCall
    StatelessIf StatelessRandomGetKeyCounter StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessWhile
    StopGradient Switch TensorListFromTensor TensorListGetItem TensorListLength TensorListPopBack
    TensorListPushBack TensorListReserve TensorListSetItem TensorListStack TensorScatterUpdate
    TruncatedNormal Unique VarHandleOp VarIsInitializedOp Variable VariableV2 Where While ZerosLike
""".split()

_ONE_STEP = """
    AddN All Any ApproximateEqual BiasAdd Cumprod Cumsum EuclideanNorm IsFinite IsInf IsNan L2Loss SegmentSum
    SquaredDifference TopKV2 UnsortedSegmentSum Xdivy Xlogy
""".split()

_OPTIMIZERS = {
    "ResourceApplyGradientDescent": 2, "ResourceApplyMomentum": 4, "ResourceApplyKerasMomentum": 4,
    "ResourceApplyAdam": 12, "ResourceApplyAdagradV2": 5, "ResourceApplyRMSProp": 8,
}  # fmt: skip

_DECOMPOSITIONS = {
    "Cholesky": "cholesky", "MatrixInverse": "inverse", "MatrixDeterminant": "_linalg_det", "Lu": "linalg_lu",
    "LogMatrixDeterminant": "_linalg_slogdet", "Qr": "linalg_qr", "Svd": "linalg_svd",
    "SelfAdjointEigV2": "linalg_eigh", "Eig": "linalg_eig", "MatrixSolve": "linalg_solve_ex",
    "MatrixTriangularSolve": "linalg_solve_triangular", "MatrixExponential": "linalg_matrix_exp",
}  # fmt: skip
"""The operators of ATen that compute the same."""


_FOURIER = {"": 5, "I": 5, "R": 2.5, "IR": 2.5}
"""Operations for each element and halving."""


def sparse_product(op: Shapes) -> Cost:
    """Indices (nonzeros, 2) and values of a sparse matrix by a dense one: each value by a row."""
    return Cost.of_macs(op.inputs[0][0] * prod(op.out[-1:]))


def blocked_cell(op: Shapes) -> Cost:
    """LSTMBlockCell and BlockLSTM: input and state together by the weight, at each step."""
    weight = max((shape for shape in op.inputs if shape and len(shape) == 2), key=prod)
    rows = next(prod(shape[:-1]) for shape in op.inputs if shape and len(shape) > 1)
    return Cost.of_macs(rows * prod(weight))


def interpolation(op: Shapes) -> Cost:
    """Four neighbours of each element of the result."""
    return Cost(0, 8 * prod(op.out))


FORMULAS: dict[str, Formula] = {
    **{name: _linalg.FORMULAS[same] for name, same in _DECOMPOSITIONS.items()},
    **{
        f"{kind}FFT{n if n > 1 else ''}": fourier(steps, n)
        for kind, steps in _FOURIER.items()
        for n in (1, 2, 3)
    },
    "SparseTensorDenseMatMul": sparse_product,
    "SparseMatMul": matrix_product,
    "_FusedMatMul": matrix_product,
    "LSTMBlockCell": blocked_cell,
    "BlockLSTM": blocked_cell,
    "BlockLSTMV2": blocked_cell,
    "ResizeBilinear": interpolation,
    **dict.fromkeys(_FREE, no_cost),
    **dict.fromkeys(_ONE_STEP, visits(1)),
    **{name: visits(steps) for name, steps in _OPTIMIZERS.items()},
}
"""Formulas by TensorFlow's types."""

MOVES = frozenset(_FREE)
"""Types of operations that compute nothing."""

COPIES = frozenset(
    """
    AssignVariableOp BatchToSpaceND BroadcastTo DeepCopy DepthToSpace DynamicPartition DynamicStitch Fill
    Gather GatherNd GatherV2 LinSpace MirrorPad MultinomialV2 OneHot OnesLike Pad PadV2 RandomStandardNormal
    RandomUniform RandomUniformInt Range ResizeNearestNeighbor ResourceGather ReverseV2 Roll ScatterNd
    SpaceToBatchND SpaceToDepth SplitV StatelessRandomNormalV2 StatelessRandomUniformV2 TensorListStack
    TensorScatterUpdate TruncatedNormal ZerosLike
""".split()
)
"""Types of those that write their result into other memory."""
