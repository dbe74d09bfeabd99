"""What a transformers, this one or another, does with a folder of two regimes; imports nothing of ropesearch.

As a program: `crossing.py VERSION TOKENS.npy FOLDER ...`; what is found is written to FOLDER.npz.
"""

import inspect
import sys
from typing import Any

import numpy as np
import torch
import transformers

PROMPT_TOKENS = 60
NUM_NEW = 12


def measured(folder: str, tokens: Any) -> dict[str, Any]:
    """Tables and logits of a plain load; `tokens` are int64 ids, shape (256,).

    table_N, attention_factor_N and logits_N (N, vocabulary) of a pass of N tokens. Of the tokens from PROMPT_TOKENS on,
    the logits (NUM_NEW, vocabulary) of whole passes that end before them, of a loop with a cache, and of generate(),
    which is held to these tokens. `batched`: the logits of 20 tokens in a batch with 256.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rotary, ids = model.model.rotary_emb, torch.from_numpy(tokens)[None]
    found: dict[str, Any] = {}
    with torch.no_grad():
        for length in (1, 64, 65, 256):
            found[f"logits_{length}"] = model(input_ids=ids[:, :length], use_cache=False).logits[0]
            found[f"table_{length}"] = rotary.inv_freq.clone()
            found[f"attention_factor_{length}"] = torch.tensor(rotary.attention_scaling, dtype=torch.float64)
        ends = range(PROMPT_TOKENS, PROMPT_TOKENS + NUM_NEW)
        found["whole"] = torch.stack([model(input_ids=ids[:, :end], use_cache=False).logits[0, -1] for end in ends])
        takes_cache = "cache" in inspect.signature(type(model).forward).parameters  # the name from 5.24 on
        cache = {"cache" if takes_cache else "past_key_values": transformers.DynamicCache(config=model.config)}
        parts = [ids[:, :PROMPT_TOKENS], *(ids[:, end : end + 1] for end in ends[:-1])]
        looped = [model(input_ids=part, use_cache=True, **cache).logits[0, -1] for part in parts]
        found["looped"] = torch.stack(looped)
        generated = model.generate(
            ids[:, :PROMPT_TOKENS],
            attention_mask=torch.ones(1, PROMPT_TOKENS, dtype=torch.long),
            min_new_tokens=NUM_NEW,
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            prefix_allowed_tokens_fn=lambda _, sequence: [int(ids[0, len(sequence)])],
        )
        found["generated"] = torch.cat(generated.logits)
        mask = torch.ones(2, 256, dtype=torch.long)
        mask[1, 20:] = 0
        rows = torch.cat([ids, ids * mask[1:]])
        found["batched"] = model(input_ids=rows, attention_mask=mask, use_cache=False).logits[1, :20]
    return {name: value.numpy() for name, value in found.items()}


if __name__ == "__main__":
    version, tokens, *folders = sys.argv[1:]
    assert transformers.__version__ == version, transformers.__version__
    for folder in folders:
        np.savez(f"{folder}.npz", **measured(folder, np.load(tokens)))
