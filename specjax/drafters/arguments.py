"""Checks of what several families are given."""


def check_draft_length(draft_length: int) -> None:
    """Raises ValueError when a draft would have no token."""
    if draft_length < 1:
        raise ValueError(f"draft_length must be at least 1; got {draft_length}. To draft nothing use Empty()")


def check_target_vocab_size(size: int | None) -> None:
    """Raises ValueError when there would be no token."""
    if size is not None and size < 1:
        raise ValueError(f"target_vocab_size must be at least 1; got {size}. None stands for the drafter's own")


def check_matches(min_match: int, max_match: int) -> None:
    """Raises ValueError when no length of a match lies between the two."""
    if not 1 <= min_match <= max_match:
        raise ValueError(f"min_match must be 1 to max_match = {max_match}; got {min_match}; change one of them")
