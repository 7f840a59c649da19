"""Names of the figures of a model, for commands that check them before heavy imports."""

FIGURE_NAMES = ("filters", "positions", "distance", "rollout", "heads", "features", "entropy",
                "norms", "similarity")  # fmt: skip
# A name without an ending makes a PNG.
FILE_NAMES = (
    *FIGURE_NAMES,
    *(f"{name}.{form}" for form in ("png", "pdf", "svg") for name in FIGURE_NAMES),
)
