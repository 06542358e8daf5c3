"""Whether data can support a claim: refusals before and after a fit, and warnings."""

from __future__ import annotations

import math

import numpy as np

from common.errors import UserError
from scaling.fit import Fit, Z
from scaling.forms import FORMS
from scaling.records import Points

_COLLINEAR, _NEARLY_COLLINEAR = 0.99, 0.9  # correlations of log N and log D
_ILL_CONDITIONED = 1e4
_NEAR = 1.02  # factor by which values differ that are the same but for rounding
_WIDE = 0.1  # half-width of an exponent's interval
_AXES = {"params": "sizes (N)", "tokens": "numbers of tokens (D)"}
_ACTS_ON = {"alpha": "params", "alpha_N": "params", "beta": "tokens", "alpha_D": "tokens"}


def distinct(values: np.ndarray) -> int:
    """How many values there are that differ by more than rounding."""
    return 1 + int((np.diff(np.log(np.sort(values))) > math.log(_NEAR)).sum())


def _correlation(points: Points) -> float:
    """Of log N and log D."""
    return float(np.corrcoef(np.log(points.params), np.log(points.tokens))[0, 1])


def refuse_unidentifiable(points: Points, form: str) -> None:
    """Refuse data that cannot determine a form's exponents, whatever the losses are."""
    chosen = FORMS[form]
    needed = len(chosen.names) + 2
    if len(points) < needed:
        raise UserError(
            f"{points.source}: {len(points)} records, where the {form} form with its {len(chosen.names)} parameters "
            f"needs {needed} or more; add runs"
        )
    for exponent in chosen.exponents:
        axis = _ACTS_ON[exponent]
        if (n := distinct(getattr(points, axis))) < 3:
            raise UserError(
                f"{points.source}: {exponent} cannot be identified from {n} different {_AXES[axis]}, three are needed; "
                f"add runs with others"
            )
    correlation = _correlation(points)
    if abs(correlation) > _COLLINEAR:
        raise UserError(
            f"{points.source}: N and D change together (correlation {correlation:.3f} of their logarithms), so that "
            f"their exponents cannot be told apart; add runs with other numbers of tokens per parameter"
        )


def refuse_undetermined(points: Points, fit: Fit) -> None:
    """Refuse a fit whose exponents the losses leave open: an interval that reaches zero."""
    errors = fit.standard_errors
    for name, place in fit.form.exponents.items():
        value, half = float(fit.theta[place]), Z * float(errors[place])
        flat = np.abs(fit.jacobian[place]).max() < 1e-5
        if flat or not value - half > 0:
            how = "its term vanishes" if flat else f"{value:.3g} +- {half:.2g} does not exclude 0"
            raise UserError(
                f"{points.source}: {name} cannot be identified: {how}; add runs with a wider range of "
                f"{_AXES[_ACTS_ON[name]]}, or less noise"
            )


def warnings(points: Points, fit: Fit) -> list[str]:
    """What weakens a fit that is not refused."""
    found = []
    for axis, name in _AXES.items():
        values = getattr(points, axis)
        if (span := float(values.max() / values.min())) < 10:
            found.append(f"{name} span a factor of {span:.1f}, less than a decade")
    correlation = _correlation(points)
    if abs(correlation) > _NEARLY_COLLINEAR:
        found.append(f"N and D are nearly collinear (correlation {correlation:.2f} of their logarithms)")
    if fit.condition > _ILL_CONDITIONED:
        found.append(f"the fit is ill-conditioned ({fit.condition:.1e})")
    if fit.share < 0.5:
        found.append(f"only {fit.share:.0%} of {fit.starts} starts reached the optimum")
    errors = fit.standard_errors
    for name, place in fit.form.exponents.items():
        if Z * errors[place] > _WIDE:
            found.append(f"{name} is known to +-{Z * errors[place]:.2f} only")
    return found
