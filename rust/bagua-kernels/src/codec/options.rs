//! Options of codecs, as users set them.

use std::fmt;

use crate::error::{Error, Result};

/// The value of an option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CodecOption {
    /// An integer, such as a number of elements.
    Int(i64),
    /// A float, such as a fraction of the elements.
    Float(f64),
}

/// Writes the value as Python does: a float has a point or an exponent, so that 1 and 1.0 differ.
impl fmt::Display for CodecOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecOption::Int(value) => write!(f, "{value}"),
            CodecOption::Float(value) => write!(f, "{value:?}"),
        }
    }
}

/// The options that were set for one codec. Each can be taken once.
pub struct Options<'a> {
    codec: &'a str,
    left: Vec<&'a (String, CodecOption)>,
}

impl<'a> Options<'a> {
    /// Creates the options set for the codec of this name.
    pub fn new(codec: &'a str, given: &'a [(String, CodecOption)]) -> Options<'a> {
        Options { codec, left: given.iter().collect() }
    }

    /// Returns the name of the codec, for error texts.
    pub fn codec(&self) -> &'a str {
        self.codec
    }

    /// Returns true if an option was set and not taken.
    pub fn has(&self, name: &str) -> bool {
        self.left.iter().any(|(given, _)| given == name)
    }

    /// Takes an option, if it was set.
    pub fn take(&mut self, name: &str) -> Option<CodecOption> {
        let at = self.left.iter().position(|(given, _)| given == name)?;
        Some(self.left.swap_remove(at).1)
    }

    /// Takes an integer option of at least `least`. Returns `default` if it was not set.
    ///
    /// # Errors
    /// `UnsupportedType` for a float, `InvalidArgument` for a smaller value.
    pub fn int(&mut self, name: &str, default: i64, least: i64) -> Result<i64> {
        match self.take(name) {
            None => Ok(default),
            Some(CodecOption::Int(value)) if value >= least => Ok(value),
            Some(CodecOption::Int(value)) => {
                Err(Error::InvalidArgument(format!("{} {name}={value}: must be at least {least}", self.codec)))
            }
            Some(value @ CodecOption::Float(_)) => {
                Err(Error::UnsupportedType(format!("{} {name}={value}: must be an integer", self.codec)))
            }
        }
    }

    /// Checks that all options were taken.
    ///
    /// # Errors
    /// `UnsupportedType` if the codec does not have an option; the error names it.
    pub fn finish(self) -> Result<()> {
        match self.left.first() {
            None => Ok(()),
            Some((name, _)) => Err(Error::UnsupportedType(format!("codec {} has no option {name:?}", self.codec))),
        }
    }
}
