"""Training in the dullest way: one process, one device, no engine, no mesh, one loop over the whole global batch.

Of the trainer it takes the definition of what is trained and nothing else: the model, the rows of a global batch, the
learning rate of a step, and the numbers that a seed and a name stand for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from data.loader import Feed
from models.config import ModelConfig
from models.transformer import Transformer
from optim.build import build_optimizer
from trainer.certify.findings import SMALL
from trainer.config import TrainingConfig
from trainer.initialize import normal
from trainer.loop import learning_rate
from trainer.runtime import Runtime
from trainer.scaler import INITIAL_SCALE, INTERVAL

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


class Reference:
    """A plain model and its optimizer.

    A step is `start_step`, `difference_of_gradient` for every parameter, `update`, `difference_of_weight` for every
    parameter. After it the weights are those of the run that was compared.
    """

    def __init__(self, config: TrainingConfig, model_config: ModelConfig, batches: Feed, runtime: Runtime):
        """`runtime` is the layout's: what counts here is its device, and for `aux_loss_over: batch` how many ranks."""
        self._config, self._batches, self._device = config, batches, runtime.device
        self._ranks = runtime.data_ranks
        device = runtime.device
        with torch.device("meta"):
            model = Transformer(model_config)
        self._model = model.to_empty(device=device)
        self.weights: dict[str, Tensor] = dict(self._model.named_parameters())
        self._state = self.weights | {name: buffer.zero_() for name, buffer in self._model.named_buffers()}
        for name, init in self._model.initial_values().items():
            weight = self.weights[name].detach()
            if init.kind == "normal":
                drawn = torch.from_numpy(normal(config.run.seed, name, 0, weight.numel(), init.std))
                weight.copy_(drawn.view(weight.shape))
            else:
                weight.fill_(1.0 if init.kind == "ones" else 0.0)
        self._optimizer = self._make_optimizer(self._model.parameter_roles())
        self._loss_scale = config.train.loss_scale_init or INITIAL_SCALE if config.train.precision == "fp16" else 1.0
        self._good_steps = 0
        self._before: dict[str, Tensor] = {}
        self._norm, self._update_norm = 0.0, 0.0

    def _make_optimizer(self, roles: Mapping[str, Mapping[str, Any]]) -> torch.optim.Optimizer:
        """Parameter by parameter. A rule for matrices is its own reference, on whole matrices in one process."""
        optim = self._config.optim
        if optim.is_rule:
            return build_optimizer(self.weights, roles, optim)
        groups = [
            {
                "params": [weight],
                "lr_scale": optim.lr_scale_of(roles[name]["role"]),
                "weight_decay": optim.weight_decay_of(roles[name]["role"]),
            }
            for name, weight in self.weights.items()
        ]
        return _OPTIMIZERS[optim.name](groups, lr=optim.lr, foreach=False, **optim.resolved())  # type: ignore[call-arg]

    def start_step(self, step: int) -> tuple[float, float]:
        """Compute the gradients of a step, counted from 1, at the present weights; return loss and gradient norm.

        The weights of a micro-batch are in the config's precision, as are their gradients; sums of these are fp32. So
        with equal micro-batches half precision rounds here where it rounds in the layout.
        """
        batch = self._batches.train(step - 1, 0, 1)
        n_valid = max(1, int(batch.mask.sum()))
        dtype = _DTYPES[self._config.train.precision]
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        loss_sum, self._counts_LE = 0.0, torch.zeros((), dtype=torch.float64)
        micro_batches = self._micro_batches(len(batch.tokens), step)
        for rows in micro_batches:
            tokens, targets, mask = (
                torch.from_numpy(array[rows]).to(self._device) for array in (batch.tokens, batch.targets, batch.mask)
            )
            rounded = {name: weight.to(dtype) for name, weight in self.weights.items()}
            apart = {}  # the documents of each row, where they are kept apart
            if batch.documents is not None:
                apart["documents_BT"] = torch.from_numpy(batch.documents[rows]).to(self._device)
            if (moe := self._config.model.moe) is None:
                logits_BTV = functional_call(self._model, rounded, (tokens,), apart)
                loss = F.cross_entropy(logits_BTV[mask], targets[mask], reduction="sum")
                balance = 0.0
            else:  # routing comes with the model's own loss, and a second forward would round on its own
                loss, routing = functional_call(self._model, rounded, (tokens, targets, mask), apart)
                n_balanced = len(batch.tokens) if moe.aux_loss_over == "sequence" else len(micro_batches)
                balance = moe.aux_loss_coef * routing.balance / n_balanced
                balance = balance + moe.z_loss_coef * routing.z / len(batch.tokens)
                self._counts_LE = self._counts_LE + routing.counts.double().cpu()
            ((loss / n_valid + balance) * self._loss_scale).backward()
            loss_sum += float(loss.detach().double())
        for weight in self.weights.values():
            assert weight.grad is not None
            weight.grad /= self._loss_scale
        self._norm = self._gradient_norm()
        return loss_sum / n_valid, self._norm

    def _micro_batches(self, n_rows: int, step: int) -> np.ndarray:
        """Numbers of the rows that go together: of one rank, or of all where they balance their load together."""
        size, moe = self._config.stage_at(step).config.train.micro_batch_size, self._config.model.moe
        if moe is None or moe.aux_loss_over == "sequence":
            return np.arange(n_rows).reshape(-1, size)
        by_rank = np.arange(n_rows).reshape(self._ranks, -1, size)
        return by_rank.transpose(1, 0, 2).reshape(-1, self._ranks * size)

    def difference_of_weight(self, name: str, theirs: Tensor) -> float:
        """Difference of another run's weight from this one's, relative to the last update; that weight is taken over.

        Before the first update it is relative to the weight itself. Buffers are weights in this.
        """
        weight = self._state[name].detach()
        size = weight - self._before[name] if self._before else weight
        difference = _relative_norm(theirs - weight, size, SMALL * self._update_norm)
        weight.copy_(theirs)
        return difference

    def difference_of_gradient(self, name: str, theirs: Tensor) -> float:
        """Relative difference of another run's gradient from this one's, which it then takes the place of.

        The update is computed from the other run's gradient. An optimizer may turn a difference of rounding into one
        of any size (Adam does where a gradient is as small as its rounding), and that is no fault of a layout.
        """
        gradient = self.weights[name].grad
        assert gradient is not None
        difference = _relative_norm(theirs - gradient, gradient, SMALL * self._norm)
        gradient.copy_(theirs)
        return difference

    def update(self, step: int) -> bool:
        """Clip and update, unless a gradient is not finite, which ends in False and the weights as they were."""
        self._before = {name: weight.detach().clone() for name, weight in self._state.items()}
        norm, clip = self._gradient_norm(), self._config.train.grad_clip
        finite = math.isfinite(norm)
        if finite:
            for weight in self.weights.values():
                assert weight.grad is not None
                weight.grad *= 1.0 if clip is None else min(1.0, clip / norm) if norm else 1.0
            lr = learning_rate(step, self._config)
            for group in self._optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._optimizer.step()
            self._move_selection_bias()
        squares = (_squares(weight.detach() - self._before[name]) for name, weight in self.weights.items())
        self._update_norm = math.sqrt(sum(squares))
        self._adapt_loss_scale(finite)
        return finite

    def _move_selection_bias(self) -> None:
        """Up for each expert with less than the mean load of its layer, down for those with more."""
        rate = 0.0 if self._config.model.moe is None else self._config.model.moe.bias_update_rate
        layers = [name for name in self._state if name.endswith("selection_bias")]
        for layer, name in enumerate(layers if rate else []):
            mean = float(self._counts_LE[layer].mean())
            for expert, count in enumerate(self._counts_LE[layer].tolist()):
                self._state[name][expert] += rate * ((count < mean) - (count > mean))

    def _gradient_norm(self) -> float:
        return math.sqrt(sum(_squares(weight.grad) for weight in self.weights.values() if weight.grad is not None))

    def _adapt_loss_scale(self, finite: bool) -> None:
        """Half after an overflow, double after so many good steps; see `trainer/scaler.py`."""
        if self._config.train.precision != "fp16":
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self._loss_scale = max(1.0, self._loss_scale / 2)
        elif self._good_steps == (self._config.train.loss_scale_interval or INTERVAL):
            self._loss_scale, self._good_steps = self._loss_scale * 2, 0


def _squares(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().sum())


def _relative_norm(difference: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Frobenius norm of a difference over that of the reference, or over `floor` if that is larger; 0 / 0 is 0."""
    error, size = math.sqrt(_squares(difference)), max(math.sqrt(_squares(reference)), floor)
    if error == 0.0:
        return 0.0
    return error / size if size else math.inf
