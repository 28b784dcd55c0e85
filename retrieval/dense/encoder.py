"""Encodes texts to unit vectors with a Hugging Face encoder: prefix, pooling over tokens, normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from retrieval.index_config import EncoderConfig
from retrieval.types import IndexFolderError

if TYPE_CHECKING:
    import torch


def devices_of(device: str) -> list[str]:
    """Return the names of the devices that encode; ``auto`` is every GPU, or the CPU without a GPU."""
    import torch

    if device != "auto":
        return [device]
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def dimension_of(config: EncoderConfig) -> int:
    """Return the dimension of an encoder's vectors, without loading the model. Raises IndexFolderError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model).hidden_size
    except (OSError, ValueError) as error:
        raise _unloadable(config, error) from error


def _unloadable(config: EncoderConfig, error: Exception) -> IndexFolderError:
    return IndexFolderError(
        f"encoder {config.model}: cannot be loaded ({error}); give the Hugging Face folder of the encoder that the "
        "index was built with"
    )


class TextEncoder:
    """Encodes texts to unit vectors as e5 and MiniLM do.

    Source for e5: Search-R1's search/index_builder.py and retrieval_server.py (mean over the attention mask, then L2).

    Raises IndexFolderError if the model cannot be loaded.
    """

    def __init__(self, config: EncoderConfig, *, threads: int = 1, device: str = "auto") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(threads)
        device = devices_of(device)[0]
        self.config, self.device = config, device
        # float16 on a GPU, as in Search-R1; float32 on CPU
        dtype = torch.float16 if device.startswith("cuda") else torch.float32
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.model)
            self._model = AutoModel.from_pretrained(config.model, dtype=dtype).to(device).eval()
        except (OSError, ValueError) as error:
            raise _unloadable(config, error) from error
        self.dimension: int = self._model.config.hidden_size

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """Return the unit vectors of search queries, [len(texts), dimension] float32."""
        return self._encode([self.config.query_prefix + text for text in texts])

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        """Return the unit vectors of passages, [len(texts), dimension] float32."""
        return self._encode([self.config.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> np.ndarray:
        import torch

        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        # texts of similar length share a batch, to save padding
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        with torch.inference_mode():
            for start in range(0, len(order), self.config.batch_size):
                rows = order[start : start + self.config.batch_size]
                inputs = self._tokenizer(
                    [texts[row] for row in rows],
                    padding=True, truncation=True, max_length=self.config.max_length, return_tensors="pt",
                ).to(self.device)  # fmt: skip
                states = self._model(**inputs).last_hidden_state.float()
                pooled = pool(states, inputs["attention_mask"], self.config.pooling)
                vectors[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pool the hidden states of a text to one vector: the mean over the tokens, or the first token.

    Args:
        states: [B, T, H] last hidden states.
        mask: [B, T] 1 for tokens, 0 for padding.

    Returns:
        [B, H]
    """
    if pooling == "cls":
        return states[:, 0]
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1.0)
