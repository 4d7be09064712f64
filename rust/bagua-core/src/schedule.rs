//! Which bucket goes next: a pure state machine, no clock, no lock, no thread.
