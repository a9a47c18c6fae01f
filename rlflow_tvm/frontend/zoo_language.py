"""The transformers of the evaluation, from the transformers library's configurations, with random weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
)


class _Encoder(nn.Module):
    """BERT with tensors in and the last hidden state, (batch, sequence, hidden), out."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        found = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return found.last_hidden_state


class _Classifier(nn.Module):
    """ViT with the image in and the logits, (batch, classes), out."""

    def __init__(self, vit: ViTForImageClassification) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.vit(pixel_values=pixel_values).logits


class _Segmenter(nn.Module):
    """SegFormer with the image in and the logits, (batch, classes, height / 4, width / 4), out."""

    def __init__(self, segformer: SegformerForSemanticSegmentation) -> None:
        super().__init__()
        self.segformer = segformer

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.segformer(pixel_values=pixel_values).logits


def bert(**config: int) -> nn.Module:
    """BERT (Devlin et al. 2018), Base unless `config` says otherwise, without the pooling layer."""
    settings = BertConfig.from_dict({"attn_implementation": "eager", **config})
    return _Encoder(BertModel(settings, add_pooling_layer=False))


def vit(**config: int) -> nn.Module:
    """ViT (Dosovitskiy et al. 2020), Base with 16x16 patches unless `config` says otherwise, 1000 classes."""
    settings = ViTConfig.from_dict({"attn_implementation": "eager", "num_labels": 1000, **config})
    return _Classifier(ViTForImageClassification(settings))


def segformer(**config: Any) -> nn.Module:
    """SegFormer (Xie et al. 2021), B0 with the 150 classes of ADE20K unless `config` says otherwise."""
    settings = SegformerConfig.from_dict({"attn_implementation": "eager", "num_labels": 150, **config})
    return _Segmenter(SegformerForSemanticSegmentation(settings))
