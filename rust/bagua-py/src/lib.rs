//! The door between Python and bagua-core.
