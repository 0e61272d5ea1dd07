"""The README.md that is saved with a language model: what it is, and how to use it."""

from calm.models.configuration import CalmConfig


def model_card(config: CalmConfig, parameters: int) -> str:
    backbone, head = config.backbone_config, config.head
    return f"""---
library_name: calm-lm
pipeline_tag: text-generation
tags: [calm, continuous-autoregressive]
---

# A continuous autoregressive language model

It predicts one vector of {config.latent_size} numbers for every {config.chunk_size} tokens.

| | |
|---|---|
| parameters, with the autoencoder | {parameters:,} |
| backbone | {backbone.model_type}, {backbone.num_hidden_layers} layers of {backbone.hidden_size} |
| head | {head}, {config.num_head_layers} blocks |
| model input | {config.model_input} |
| vocabulary | {config.vocab_size:,} |
| tokens a chunk (K) | {config.chunk_size} |

```python
import calm
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY_OR_NAME")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY_OR_NAME")
```

`run.json`, where it is present, holds the configuration, the versions and the scores of the run that made it.
"""
