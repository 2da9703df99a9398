//! What must not be taken, must not panic and must not be lost.
