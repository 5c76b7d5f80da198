"""Ops whose results torch itself does not determine: two runs without a scope may differ."""

LAPACK = "the last bits of LAPACK's least squares depend on where its working memory lies"

UNDETERMINED = {
    "linalg.lstsq": LAPACK,
    "linalg.lstsq.grad_oriented": LAPACK,
}

REFUSED = tuple(
    f"{name}, inplace_variant"
    for name in (
        *("as_strided", "as_strided.partial_views", "squeeze", "squeeze.multiple", "t", "transpose"),
        *("unsqueeze", "nn.functional.dropout3d"),
    )
)
"""Calls after which torch itself cannot record a write into the result, where its gradient is retained.

A routine that takes part in the backward pass cannot give such a result another value.
"""

UNREACHABLE_STATISTICS = ("_batch_norm_with_update", "jvp")
"""An op and a transform by whose tangent torch saves running statistics where no result leads to.

A routine that gives the statistics another value has torch raise in the backward pass.
"""
