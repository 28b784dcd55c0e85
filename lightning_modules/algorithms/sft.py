"""Supervised fine-tuning: cross-entropy on the model's own tokens of given trajectories."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_modules.batch import TokenBatch
from lightning_modules.models.policy import hidden_before, output_head, positions
from lightning_modules.models.projection import TokenStatistics
from lightning_modules.training.supervised import SupervisedModule


class SFT(SupervisedModule):
    """Supervised fine-tuning on given trajectories::

        L = -1/N sum_t m_t log pi(y_t | h_t)        N: number of model tokens in the global batch

    On a teacher's trajectories this is SeqKD (docs/algorithms/kd.md). Prompt and observation tokens are context only.
    A final EOS is learnt if the trajectories have one with mask 1.
    """

    def token_losses(self, batch: TokenBatch) -> Mapping[str, Tensor]:
        at = positions(batch.mask)
        hidden = hidden_before(self.policy, batch, at)
        columns = output_head(self.policy)(
            hidden, function=TokenStatistics(accuracy=True), rows=(batch.input_ids[at],), chunk=self.logits_chunk
        )
        ce = -columns[:, 0]
        return {"loss": ce, "ce": ce.detach(), "token_accuracy": columns[:, 1].detach()}
