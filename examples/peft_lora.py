"""LoRA by PEFT on both forms of SiameseNorm: adapters on the usual projections, what the scheme adds trained whole.

    python examples/peft_lora.py

A rewired model keeps the names of its host's projections. What the scheme adds is small, and is named by the modules
that hold it: `attn_residual` and `mlp_residual` in each block, and `readout` in front of the head. (The norms alone are
`norm_x` and `norm_y`; hybrid-pre's vector c1 is no module of its own.)
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LORA = LoraConfig(
    r=4,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    modules_to_save=["attn_residual", "mlp_residual", "readout"],
)


def main():
    for form in ("post", "hybrid"):
        torch.manual_seed(0)
        model = get_peft_model(siamesenorm.rewire(LlamaForCausalLM(CONFIG), "siamese", x=form), LORA)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        ids = torch.randint(0, 64, (4, 16))
        losses = []
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        adapted = model(input_ids=ids).logits
        # An ordinary model of the package again, which save_pretrained saves.
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-5)
        print(f"x={form!r}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps; merged: the same logits")


if __name__ == "__main__":
    main()
