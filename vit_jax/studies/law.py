"""A power law with saturation, fitted to the error of runs against their compute.

    E = a (C + d)^-b + c

E is the error (0 to 1), C the compute (in any unit, here exaFLOPs), c the error that more compute
does not reduce, and d the compute at which the law leaves the error of an untrained model.

Source: Zhai et al. 2021 (arXiv:2106.04560), equation 1.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

NUM_PARAMETERS = 4
LEAST_POINTS = NUM_PARAMETERS + 1  # one more, so that the residuals say something
_LARGEST_SHIFT = 100.0  # of d, in units of the smallest compute
_EXPONENTS = (1e-3, 10.0)


class Law(NamedTuple):
    """The parameters of E = a (C + d)^-b + c."""

    a: float
    b: float
    c: float
    d: float

    def predict(self, compute: np.ndarray) -> np.ndarray:
        """The error at each compute, of the same shape."""
        return self.a * (np.asarray(compute, np.float64) + self.d) ** -self.b + self.c


class Fit(NamedTuple):
    """A fitted law, and laws fitted to data drawn around it.

    law: the least squares of log E.
    residual_std: standard deviation of log E around the law, with one degree of freedom less for
      each parameter.
    draws: [(a law, a standard deviation)] of a parametric bootstrap.
    """

    law: Law
    residual_std: float
    draws: Sequence[tuple[Law, float]]

    def band(self, compute: np.ndarray, *, of_runs: bool = False) -> np.ndarray:
        """90 % band of the error, (2, ...): lower and upper bound at each compute.

        Of the law itself; `of_runs`: of another run, which scatters around the law.
        """
        at = np.asarray(compute, np.float64)
        laws = np.stack([law.predict(at) for law, _ in self.draws])
        if of_runs:
            rng = np.random.default_rng(1)
            stds = np.array([std for _, std in self.draws]).reshape(-1, *[1] * at.ndim)
            laws = laws * np.exp(stds * rng.standard_normal(laws.shape))
        return np.quantile(laws, [(1 - 0.9) / 2, (1 + 0.9) / 2], axis=0)


def fit_law(compute: Sequence[float], error: Sequence[float], *, num_draws: int = 200) -> Fit:
    """Fit the law to at least LEAST_POINTS runs, by least squares of log E.

    The band is a parametric bootstrap: for each draw, errors are drawn around the fitted law with
    the residuals' standard deviation, which is itself drawn (scaled inverse chi-square, since few
    runs determine it poorly), and the law is fitted again. a and b are positive, d is not negative,
    and c is between 0 and the smallest error.

    Args:
      compute: positive numbers, (N,).
      error: positive numbers, (N,).
      num_draws: number of laws in the bootstrap; the result depends on the arguments only.
    """
    x, y = np.asarray(compute, np.float64), np.asarray(error, np.float64)
    unit = float(x.min())
    starts = [
        np.array([np.log(y.max()), exponent, shift, share * y.min()])
        for exponent in (0.2, 0.6)
        for shift in (0.1, 1.0)
        for share in (0.1, 0.8)
    ]
    found = min((_solve(x / unit, y, start) for start in starts), key=lambda found: found.cost)
    freedom = len(x) - NUM_PARAMETERS
    std = float(np.sqrt(2 * found.cost / freedom))
    fitted = np.exp(_log_law(found.x, x / unit))
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(num_draws):
        drawn_std = std * np.sqrt(freedom / rng.chisquare(freedom))
        drawn = fitted * np.exp(drawn_std * rng.standard_normal(len(x)))
        again = _solve(x / unit, drawn, found.x)
        draws.append((_in_units(again.x, unit), drawn_std))
    return Fit(_in_units(found.x, unit), std, draws)


def _log_law(parameters: np.ndarray, x: np.ndarray) -> np.ndarray:
    """log E for (log a, b, d, c), where the unit of compute is the smallest one."""
    log_a, b, d, c = parameters
    return np.log(np.exp(log_a) * (x + d) ** -b + c)


def _solve(x: np.ndarray, y: np.ndarray, start: np.ndarray) -> Any:
    import scipy.optimize  # takes a second, and every config reads the keys of studies

    lower = np.array([-30.0, _EXPONENTS[0], 0.0, 0.0])
    upper = np.array([30.0, _EXPONENTS[1], _LARGEST_SHIFT, y.min()])
    return scipy.optimize.least_squares(
        lambda parameters: _log_law(parameters, x) - np.log(y),
        np.clip(start, lower + 1e-9, upper - 1e-9),
        bounds=(lower, upper),
        x_scale=(1.0, 0.1, 1.0, max(float(y.min()), 1e-6)),
        xtol=1e-12, ftol=1e-12, gtol=1e-12,
    )  # fmt: skip


def _in_units(parameters: np.ndarray, unit: float) -> Law:
    """The law where compute is in the caller's unit."""
    log_a, b, d, c = (float(value) for value in parameters)
    return Law(float(np.exp(log_a)) * unit**b, b, c, d * unit)


class Prediction(NamedTuple):
    """A law fitted without the run that has the most compute, and what it predicts for it.

    compute, measured: of that run, and its error.
    error, low, high: the predicted error, and the band with 90 % of new runs.
    """

    fit: Fit
    num_points: int
    compute: float
    measured: float
    error: float
    low: float
    high: float


def predict_largest(compute: Sequence[float], error: Sequence[float]) -> Prediction | None:
    """Fit the law to the front of all runs but the one with the most compute; predict that one.

    None if the front has fewer than LEAST_POINTS runs.
    """
    held_out = max(range(len(compute)), key=compute.__getitem__)
    rest = [i for i in range(len(compute)) if i != held_out and error[i] > 0]
    x, y = [compute[i] for i in rest], [error[i] for i in rest]
    front = pareto_front(x, y)
    if len(front) < LEAST_POINTS:
        return None
    fit = _cached_fit(tuple(x[i] for i in front), tuple(y[i] for i in front))
    at = np.array([compute[held_out]])
    numbers = [float(found[0]) for found in (fit.law.predict(at), *fit.band(at, of_runs=True))]
    return Prediction(fit, len(front), compute[held_out], error[held_out], *numbers)


_cached_fit = functools.lru_cache(fit_law)  # a report is written after every member


def pareto_front(compute: Sequence[float], error: Sequence[float]) -> list[int]:
    """Indices of the runs that no run beats with as much compute or less, by compute.

    Of runs with equal compute the best one counts; of equal ones, the first.
    """
    order = sorted(range(len(compute)), key=lambda i: (compute[i], error[i], i))
    front: list[int] = []
    for i in order:
        if not front or error[i] < error[front[-1]]:
            front.append(i)
    return front
