"""wgmma, mma.sync, ldmatrix, stmatrix and movmatrix, through the datapath's fragment maps."""

from __future__ import annotations
