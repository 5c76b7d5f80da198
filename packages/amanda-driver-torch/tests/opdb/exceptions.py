"""Ops whose results torch itself does not determine: two runs without a scope may differ."""

LAPACK = "the last bits of LAPACK's least squares depend on where its working memory lies"

UNDETERMINED = {
    "linalg.lstsq": LAPACK,
    "linalg.lstsq.grad_oriented": LAPACK,
}
