//! Where a trainer computes: `--device` and `--num-gpus`, resolved against what the machine has.

use std::fmt;
use std::str::FromStr;

use tch::Device;

/// The value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where there is a device, else the CPU.
    Auto,
    Cpu,
    /// The device with this index, or the one that the local rank selects.
    Cuda(Option<u32>),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || format!("{text:?} is no device; write auto, cpu, cuda or cuda:0");
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => {
                let index = text.strip_prefix("cuda:").ok_or_else(unknown)?;
                index.parse().map(|index| Self::Cuda(Some(index))).map_err(|_| unknown())
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

/// The machine does not have what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("--num-gpus is {asked}, but this process sees {visible} CUDA devices; lower it, or use --device cpu")]
    TooMany { asked: u32, visible: u32 },
    #[error("--device {asked} needs more than the {usable} CUDA devices that this process may use; use --device auto")]
    Unavailable { asked: DeviceChoice, usable: u32 },
    #[error(
        "this trainer was given a GPU (spec.trainer.gpus: {given}), but finds no CUDA device; use an image with the CUDA \
         libraries (scripts/images.sh cuda makes one), or train on the CPU with --device cpu and without gpus"
    )]
    Unused { given: u32 },
    #[error(
        "this trainer was given {given} GPUs (spec.trainer.gpus), but computes on one; set gpus to 1 and have more trainers, \
         or choose one by --num-gpus 1"
    )]
    Idle { given: u32 },
    #[error(
        "this server was given a GPU (a limit of {given} in spec.ps.template), but finds no CUDA device; use an image with the \
         CUDA libraries (scripts/images.sh cuda makes one), or remove the limit, so that it computes on the CPU"
    )]
    UnusedByServer { given: u32 },
}

/// Checks that a server finds GPUs if it was `given` some.
///
/// # Errors
/// If it was, and sees none.
pub fn check_server(given: u32, visible: u32) -> Result<(), DeviceError> {
    if given > 0 && visible == 0 { Err(DeviceError::UnusedByServer { given }) } else { Ok(()) }
}

/// Bytes that the examples of one evaluation on a GPU take at most.
const EVALUATED_BYTES: usize = 256 << 20;
/// Examples that evaluation reads at once on a GPU, which fewer may leave idle.
const EVALUATED_EXAMPLES: usize = 1024;

/// Returns how many examples evaluation reads at once: on the CPU `few`; on a GPU more, as far as memory bears it. An example
/// takes `example_bytes` where the model is widest.
#[must_use]
pub fn evaluation_batch(device: Device, few: usize, example_bytes: usize) -> usize {
    match device {
        Device::Cpu => few,
        _ => (EVALUATED_BYTES / example_bytes.max(1)).min(EVALUATED_EXAMPLES).max(few),
    }
}

/// The device of the process with this local rank. Processes on one machine cycle through the
/// first `num_gpus` of its `visible` devices, all of them if no number is given. `given` is the number of GPUs that the job
/// gives to this process alone.
///
/// # Errors
/// If more devices are asked for than there are, or the job gives some that are not there or would be idle.
pub fn choose(
    choice: DeviceChoice,
    num_gpus: Option<u32>,
    visible: u32,
    local_rank: u32,
    given: u32,
) -> Result<Device, DeviceError> {
    let usable = match num_gpus {
        Some(asked) if asked > visible => return Err(DeviceError::TooMany { asked, visible }),
        Some(asked) => asked,
        None => visible,
    };
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu),
        _ if given > 1 && num_gpus.is_none() && usable > 1 => Err(DeviceError::Idle { given }),
        DeviceChoice::Auto if visible == 0 && given > 0 => Err(DeviceError::Unused { given }),
        DeviceChoice::Auto if usable == 0 => Ok(Device::Cpu),
        DeviceChoice::Cuda(Some(index)) if index < usable => Ok(Device::Cuda(index as usize)),
        DeviceChoice::Auto | DeviceChoice::Cuda(None) if usable > 0 => Ok(Device::Cuda((local_rank % usable) as usize)),
        asked => Err(DeviceError::Unavailable { asked, usable }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_follows_from_the_choice_the_limit_and_the_machine() {
        let missing = |asked, usable| Err(DeviceError::Unavailable { asked, usable });
        let rows = [
            ("auto", None, 0, 0, Ok(Device::Cpu)),
            ("auto", None, 2, 3, Ok(Device::Cuda(1))),
            ("auto", Some(0), 2, 0, Ok(Device::Cpu)),
            ("auto", Some(1), 2, 1, Ok(Device::Cuda(0))),
            ("auto", Some(3), 2, 0, Err(DeviceError::TooMany { asked: 3, visible: 2 })),
            ("cpu", None, 2, 0, Ok(Device::Cpu)),
            ("cuda", None, 2, 1, Ok(Device::Cuda(1))),
            ("cuda", None, 0, 0, missing(DeviceChoice::Cuda(None), 0)),
            ("cuda:1", None, 2, 0, Ok(Device::Cuda(1))),
            ("cuda:2", None, 2, 0, missing(DeviceChoice::Cuda(Some(2)), 2)),
            ("cuda:1", Some(1), 2, 0, missing(DeviceChoice::Cuda(Some(1)), 1)),
        ];
        for (text, num_gpus, visible, local_rank, want) in rows {
            let choice: DeviceChoice = text.parse().expect(text);
            assert_eq!(choice.to_string(), text);
            assert_eq!(choose(choice, num_gpus, visible, local_rank, 0), want, "{text} {num_gpus:?} of {visible}");
        }
    }

    #[test]
    fn a_gpu_that_the_job_gives_is_used_or_refused_by_name() {
        let chosen = |choice, num_gpus, visible| choose(choice, num_gpus, visible, 0, 2);
        assert_eq!(choose(DeviceChoice::Auto, None, 1, 0, 1), Ok(Device::Cuda(0)));
        for idle in [DeviceChoice::Auto, DeviceChoice::Cuda(None), DeviceChoice::Cuda(Some(1))] {
            assert_eq!(chosen(idle, None, 2), Err(DeviceError::Idle { given: 2 }), "{idle}");
        }
        assert_eq!(chosen(DeviceChoice::Auto, Some(1), 2), Ok(Device::Cuda(0)), "as the flag says");
        assert_eq!(chosen(DeviceChoice::Auto, None, 0), Err(DeviceError::Unused { given: 2 }));
        assert_eq!(chosen(DeviceChoice::Auto, Some(0), 2), Ok(Device::Cpu), "as the flag says");
        assert_eq!(chosen(DeviceChoice::Cpu, None, 0), Ok(Device::Cpu), "as the flag says");
    }

    #[test]
    fn a_server_finds_the_gpus_that_it_was_given() {
        let missing = Err(DeviceError::UnusedByServer { given: 2 });
        for (given, visible, want) in [(0, 0, Ok(())), (0, 1, Ok(())), (2, 0, missing), (2, 1, Ok(())), (1, 1, Ok(()))]
        {
            assert_eq!(check_server(given, visible), want, "{given} given, {visible} visible");
        }
        let error = check_server(1, 0).expect_err("none is there").to_string();
        assert!(error.contains("a limit of 1 in spec.ps.template"), "{error}");
    }

    #[test]
    fn evaluation_reads_more_examples_at_once_on_a_gpu_within_its_memory() {
        let (gpu, kib) = (Device::Cuda(0), 1 << 10);
        for (device, few, example_bytes, want) in [
            (Device::Cpu, 32, 1, 32),
            (Device::Cpu, 32, 1 << 30, 32),
            (gpu, 32, 0, 1024),
            (gpu, 32, 4 * kib, 1024),
            (gpu, 32, 256 * kib, 1024),
            (gpu, 32, 1024 * kib, 256),
            (gpu, 32, 1 << 30, 32),
            (gpu, 2048, 4 * kib, 2048),
        ] {
            assert_eq!(evaluation_batch(device, few, example_bytes), want, "{device:?}, {few}, {example_bytes}");
        }
    }

    #[test]
    fn a_misspelt_device_is_refused_with_the_right_spellings() {
        for text in ["gpu", "cuda:", "cuda:x", "CPU"] {
            assert!(text.parse::<DeviceChoice>().expect_err(text).contains("cuda:0"), "{text}");
        }
    }
}
