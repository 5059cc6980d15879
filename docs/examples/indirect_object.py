"""Draw the patch sweep that everybody knows, on SmolLM2-135M: ``python docs/examples/indirect_object.py``.

In "When Mary and John went to the store, John gave a drink to" the answer is Mary; with the second name changed, it is John.
Each cell of the heatmap puts one activation of the first sentence into the run on the second: 1 is the first sentence's answer, 0
the second's (Wang et al., 2211.00593, on GPT-2).
"""

from pathlib import Path

from mi_route2 import sweep
from mi_route2.models import smollm2, smollm2_tokenizer

FIGURE = Path(__file__).parents[1] / "results" / "smollm2" / "indirect_object.png"

if __name__ == "__main__":
    grid = sweep(
        smollm2(),
        sites="resid_pre",
        clean="When Mary and John went to the store, John gave a drink to",
        corrupt="When Mary and John went to the store, Mary gave a drink to",
        answer=" Mary",
        foil=" John",
        tokenizer=smollm2_tokenizer(),
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    grid.heatmap(FIGURE)
    print(f"logit difference {grid.clean:+.2f} clean, {grid.corrupt:+.2f} corrupt; {FIGURE}")
