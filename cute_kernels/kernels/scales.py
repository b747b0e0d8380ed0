"""Numbers that more than one kernel scales logits by."""

LOG2E = 1.4426950408889634  # log2(e): softmax by powers of two
LN2 = 0.6931471805599453
# Above this sm_scale logits may be so large that scale * x - maximum, by one multiply-add, exceeds 0 by the rounding of the
# maximum: at 4e9 by 2^8, whose power of two is infinite. The variant for scales that are not positive scales first, and is
# exact there.
PLAIN_SCALE = 1024.0
