"""What is to be merged, as others say it, and whether it can be."""

from ratchet.export.merge.plan import plan_merge
from ratchet.export.merge.request import MergeBase, MergeRecipe, WeightedAdapter, matches_module

__all__ = ["MergeBase", "MergeRecipe", "WeightedAdapter", "matches_module", "require_mergeable"]


def require_mergeable(recipe: MergeRecipe) -> None:
    """Refuse what can be refused before any weight of the base is read.

    Raises:
        BaseModelError: base or adapter are not what they should be, or do not go together.
        DamagedFileError: an adapter cannot be read, or holds NaN.
        SettingsError: the recipe asks for what these files do not have.
    """
    plan_merge(recipe)
