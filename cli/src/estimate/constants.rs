//! The constants of the model: what a byte, an element and a message cost a core.

use clap::Args;

/// The constants of the model. `psjobs bench scaling` measures them on a machine, and prints them as these flags.
///
/// The defaults come from docs/performance.md, which has the commands: both ends of `psjobs bench wire`, `tcp-f32`, share two
/// cores for 54 ms a step of 200 MB, of which `shm-f32` takes 9 ms without the bytes (`byte_ns`, `element_ns`, `update_ns`);
/// `tls-f32` takes 34 ms more (`tls_ns`), and `tcp-bf16` 13 ms more than its half of the bytes would (`coding_ns`).
#[derive(Args, Clone, Debug, PartialEq)]
#[command(next_help_heading = "Constants")]
pub struct Constants {
    /// Nanoseconds of a core for a byte sent or received, at one end
    #[arg(long, value_name = "NS", default_value_t = 0.25, value_parser = number)]
    pub byte_ns: f64,
    /// Nanoseconds of a core that TLS adds to a byte, at one end
    #[arg(long, value_name = "NS", default_value_t = 0.17, value_parser = number)]
    pub tls_ns: f64,
    /// Nanoseconds of a core to add an element of a gradient to the sum of a step
    #[arg(long, value_name = "NS", default_value_t = 0.3, value_parser = number)]
    pub element_ns: f64,
    /// Nanoseconds of a core to update a parameter by SGD; each slot of an optimizer's state adds half as much
    #[arg(long, value_name = "NS", default_value_t = 0.4, value_parser = number)]
    pub update_ns: f64,
    /// Nanoseconds of a core to code or decode an element with another codec than F32
    #[arg(long, value_name = "NS", default_value_t = 0.17, value_parser = number)]
    pub coding_ns: f64,
    /// Microseconds of a core for a message with a block, at one end
    #[arg(long, value_name = "US", default_value_t = 10.0, value_parser = number)]
    pub message_us: f64,
    /// Microseconds of a server's core for the heartbeat of a trainer
    #[arg(long, value_name = "US", default_value_t = 50.0, value_parser = number)]
    pub heartbeat_us: f64,
    /// Share of a link's rate that is left for the content of TCP packets
    #[arg(long, value_name = "SHARE", default_value_t = 0.94, value_parser = share)]
    pub link_share: f64,
}

impl Default for Constants {
    fn default() -> Self {
        Self {
            byte_ns: 0.25,
            tls_ns: 0.17,
            element_ns: 0.3,
            update_ns: 0.4,
            coding_ns: 0.17,
            message_us: 10.0,
            heartbeat_us: 50.0,
            link_share: 0.94,
        }
    }
}

/// Reads a number that is not negative.
pub(super) fn number(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| *number >= 0.0 && number.is_finite());
    number.ok_or_else(|| "expected a number, 0 or more".into())
}

/// Reads a number above 0.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    number(text).ok().filter(|number| *number > 0.0).ok_or_else(|| "expected a number above 0".into())
}

/// Reads a number from 0 to 1.
pub(super) fn fraction(text: &str) -> Result<f64, String> {
    number(text).ok().filter(|number| *number <= 1.0).ok_or_else(|| "expected a number from 0 to 1".into())
}

/// Reads a number above 0, at most 1.
fn share(text: &str) -> Result<f64, String> {
    fraction(text).ok().filter(|number| *number > 0.0).ok_or_else(|| "expected a number above 0, at most 1".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        constants: Constants,
    }

    #[test]
    fn the_flags_have_the_defaults_of_the_model() {
        assert_eq!(Flags::parse_from(["estimate"]).constants, Constants::default());
        let other = Flags::parse_from(["estimate", "--byte-ns", "0.5", "--link-share", "1"]).constants;
        assert_eq!(other, Constants { byte_ns: 0.5, link_share: 1.0, ..Constants::default() });
        for (flag, wrong) in [("--byte-ns", "-1"), ("--link-share", "0"), ("--tls-ns", "inf")] {
            assert!(Flags::try_parse_from(["estimate", flag, wrong]).is_err(), "{flag} {wrong}");
        }
    }
}
