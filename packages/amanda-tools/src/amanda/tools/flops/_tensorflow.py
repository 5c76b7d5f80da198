"""What TensorFlow's types of operations cost that have no word in the vocabulary."""

from __future__ import annotations

from amanda.tools.flops._cost import Formula
from amanda.tools.flops._formulas import no_cost, visits

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

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE, no_cost),
    **dict.fromkeys(_ONE_STEP, visits(1)),
    **{name: visits(steps) for name, steps in _OPTIMIZERS.items()},
}
"""Formulas by TensorFlow's types."""

MOVES = frozenset(_FREE)
"""Types of operations that compute nothing."""
