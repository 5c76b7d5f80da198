"""Costs of TensorFlow's types of operations that have no word in the vocabulary."""

from __future__ import annotations

from math import prod

from amanda.tools.flops import _formulas as of
from amanda.tools.flops import _linalg
from amanda.tools.flops._cost import Cost, Formula, Shapes, table
from amanda.tools.flops._formulas import no_cost, visits
from amanda.tools.flops._linalg import fourier, interpolation

COPIES = frozenset(
    """
    AssignVariableOp BatchToSpaceND BroadcastTo DeepCopy DepthToSpace DynamicPartition DynamicStitch Fill
    Gather GatherNd GatherV2 LinSpace MirrorPad MultinomialV2 OneHot OnesLike Pad PadV2 RandomStandardNormal
    RandomUniform RandomUniformInt Range ResizeNearestNeighbor ResourceGather ReverseV2 Roll ScatterNd
    SpaceToBatchND SpaceToDepth SplitV StatelessRandomNormalV2 StatelessRandomUniformV2 TensorListStack
    TensorScatterUpdate TruncatedNormal ZerosLike
    """.split()
)
"""Types of operations that compute nothing and write their result into other memory."""

MOVES = COPIES | frozenset(
    """
    AnonymousIteratorV3 IteratorGetNext IteratorGetNextSync MakeIterator OptionalFromValue OptionalGetValue
    OptionalHasValue OptionalNone Assert BroadcastArgs BroadcastGradientArgs Case ConcatOffset Const
    ControlTrigger CropAndResize EmptyTensorList EnsureShape Enter Exit ExpandDims IdentityN Identity If
    InvertPermutation LoopCond Merge NextIteration NoOp PartitionedCall Placeholder PlaceholderWithDefault
    PreventGradient Rank ReadVariableOp RemoteCall Shape ShapeN Size Snapshot StatefulPartitionedCall
    StatelessIf StatelessRandomGetKeyCounter StatelessWhile StopGradient Switch TensorListFromTensor
    TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack TensorListReserve
    TensorListSetItem Unique VarHandleOp VarIsInitializedOp Variable VariableV2 Where While
    """.split()
)
"""Types of operations that compute nothing."""

_DECOMPOSITIONS = {
    "Cholesky": "cholesky", "MatrixInverse": "inverse", "MatrixDeterminant": "_linalg_det", "Lu": "linalg_lu",
    "LogMatrixDeterminant": "_linalg_slogdet", "Qr": "linalg_qr", "Svd": "linalg_svd",
    "SelfAdjointEigV2": "linalg_eigh", "Eig": "linalg_eig", "MatrixSolve": "linalg_solve_ex",
    "MatrixTriangularSolve": "linalg_solve_triangular", "MatrixExponential": "linalg_matrix_exp",
}  # fmt: skip
"""The operators of ATen that compute the same."""


def sparse_product(op: Shapes) -> Cost:
    """Count indices (nonzeros, 2) and values of a sparse matrix by a dense one: each value by a row."""
    return Cost.of_macs(op.inputs[0][0] * prod(op.out[-1:]))


def blocked_cell(op: Shapes) -> Cost:
    """Count input and state together by the weight, at each step."""
    weight = max((shape for shape in op.inputs if shape and len(shape) == 2), key=prod)
    rows = next(prod(shape[:-1]) for shape in op.inputs if shape and len(shape) > 1)
    return Cost.of_macs(rows * prod(weight))


FORMULAS: dict[str, Formula] = {
    **{name: _linalg.FORMULAS[same] for name, same in _DECOMPOSITIONS.items()},
    **dict.fromkeys(MOVES, no_cost),
    **table(
        (fourier(5, 1), "FFT IFFT"), (fourier(5, 2), "FFT2 IFFT2"), (fourier(5, 3), "FFT3 IFFT3"),
        (fourier(2.5, 1), "RFFT IRFFT"), (fourier(2.5, 2), "RFFT2 IRFFT2"), (fourier(2.5, 3), "RFFT3 IRFFT3"),
        (sparse_product, "SparseTensorDenseMatMul"), (of.matrix_product, "SparseMatMul _FusedMatMul"),
        (blocked_cell, "LSTMBlockCell BlockLSTM BlockLSTMV2"), (interpolation(4), "ResizeBilinear"),
        (visits(1), """
            AddN All Any ApproximateEqual BiasAdd Cumprod Cumsum EuclideanNorm IsFinite IsInf IsNan L2Loss
            SegmentSum SquaredDifference TopKV2 UnsortedSegmentSum Xdivy Xlogy
        """),
        (visits(2), "ResourceApplyGradientDescent"),
        (visits(4), "ResourceApplyMomentum ResourceApplyKerasMomentum"),
        (visits(5), "ResourceApplyAdagradV2"), (visits(8), "ResourceApplyRMSProp"),
        (visits(12), "ResourceApplyAdam"),
    ),
}  # fmt: skip
"""Formulas by TensorFlow's types."""
