//! The flat parameter space: tensors one behind the other, cut into blocks of equal length, the
//! blocks dealt out to the servers in turn. Everybody computes it from the same few numbers.

use std::ops::Range;

use psjobs_arithmetic::parameter_group::ParameterGroup;
use serde::{Deserialize, Serialize};

use crate::proto;

/// Elements of a block: 1 MiB of f32, small enough to overlap sending with computing, large enough
/// that a frame's overhead does not count.
pub const BLOCK_ELEMENTS: usize = 256 * 1024;

/// Blocks that one server is responsible for at most: 128 GiB of parameters. Each block costs a task, so that a shape which is
/// not meant would cost a server its memory before a single value has come.
pub const MOST_BLOCKS: usize = 1 << 17;

/// A dense parameter tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name, unique in the model.
    pub name: String,
    /// Length of each dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Differences from how the optimizer treats the others.
    #[serde(default, skip_serializing_if = "ParameterGroup::is_default")]
    pub group: ParameterGroup,
}

impl TensorSpec {
    /// A tensor that is trained as the job says.
    #[must_use]
    pub fn new(name: impl Into<String>, shape: Vec<u64>) -> Self {
        Self { name: name.into(), shape, group: ParameterGroup::default() }
    }

    /// Number of elements; `None` if it does not fit the address space.
    #[must_use]
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |product, n| product.checked_mul(usize::try_from(*n).ok()?))
    }
}

impl From<&TensorSpec> for proto::TensorSpec {
    fn from(TensorSpec { name, shape, group }: &TensorSpec) -> Self {
        let ParameterGroup { learning_rate_factor, weight_decay } = *group;
        let group = (!group.is_default()).then_some(proto::ParameterGroup { learning_rate_factor, weight_decay });
        Self { name: name.clone(), shape: shape.clone(), group }
    }
}

impl From<proto::TensorSpec> for TensorSpec {
    fn from(proto::TensorSpec { name, shape, group }: proto::TensorSpec) -> Self {
        let group = group.map_or_else(ParameterGroup::default, |group| ParameterGroup {
            learning_rate_factor: group.learning_rate_factor,
            weight_decay: group.weight_decay,
        });
        Self { name, shape, group }
    }
}

/// Why tensors cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Nothing to train.
    #[error("the model has no parameters; give it at least one trainable tensor")]
    Empty,
    /// More elements than memory has addresses.
    #[error("tensor {name} of shape {shape:?} is too large; check its shape")]
    TooLarge {
        /// The tensor that went over.
        name: String,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// More blocks than the servers hold.
    #[error(
        "the model has {elements} parameters, the job's servers ({servers}) hold {most} at most, {MOST_BLOCKS} blocks of {BLOCK_ELEMENTS} \
         on each; give the job more servers, or check the shapes"
    )]
    TooManyBlocks {
        /// Parameters of the model.
        elements: usize,
        /// Servers of the job.
        servers: usize,
        /// Parameters that they hold at most.
        most: usize,
    },
}

/// Which elements form which block and which server owns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    elements: usize,
    block_elements: usize,
    servers: usize,
}

impl Layout {
    /// Lays `tensors` out over `servers`. A model smaller than one full block a server is cut into
    /// one block for each server, so that every server has work.
    ///
    /// # Errors
    /// If there are no elements, or more than [`MOST_BLOCKS`] full blocks for each server.
    pub fn new(tensors: &[TensorSpec], servers: usize) -> Result<Self, LayoutError> {
        let mut elements = 0_usize;
        for tensor in tensors {
            elements = tensor
                .elements()
                .and_then(|n| elements.checked_add(n))
                .filter(|n| *n < (1 << 48))
                .ok_or_else(|| LayoutError::TooLarge { name: tensor.name.clone(), shape: tensor.shape.clone() })?;
        }
        if elements == 0 {
            return Err(LayoutError::Empty);
        }
        let servers = servers.max(1);
        let most = servers.saturating_mul(MOST_BLOCKS * BLOCK_ELEMENTS);
        if elements > most {
            return Err(LayoutError::TooManyBlocks { elements, servers, most });
        }
        let block_elements = elements.div_ceil(servers).clamp(1, BLOCK_ELEMENTS);
        Ok(Self { elements, block_elements, servers })
    }

    /// Elements of the whole space.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of every block but perhaps the last.
    #[must_use]
    pub fn block_elements(&self) -> usize {
        self.block_elements
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.elements.div_ceil(self.block_elements) as u32
    }

    /// The elements of a block; empty past the end.
    #[must_use]
    pub fn range(&self, block: u32) -> Range<usize> {
        let start = (block as usize).saturating_mul(self.block_elements).min(self.elements);
        start..(start + self.block_elements).min(self.elements)
    }

    /// The server that owns a block.
    #[must_use]
    pub fn owner(&self, block: u32) -> u32 {
        block % self.servers as u32
    }

    /// Which of `lanes` connections to its server a block travels over: those of a server alternate, so that the bytes
    /// of two connections differ by a block at most, and neighbours, which are sent one after the other, by different
    /// ones.
    #[must_use]
    pub fn lane(&self, block: u32, lanes: u32) -> u32 {
        block / self.servers as u32 % lanes.max(1)
    }

    /// The blocks of a server, ascending.
    pub fn owned_by(&self, server: u32) -> impl DoubleEndedIterator<Item = u32> + use<> {
        let (blocks, servers) = (self.blocks(), self.servers as u32);
        (server..blocks).step_by(servers as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(shape: &[u64]) -> TensorSpec {
        TensorSpec::new("w", shape.to_vec())
    }

    #[test]
    fn small_models_reach_every_server() {
        let layout = Layout::new(&[tensor(&[10, 10])], 3).expect("fits");
        assert_eq!((layout.blocks(), layout.block_elements()), (3, 34));
        assert_eq!(layout.range(2), 68..100);
    }

    #[test]
    fn impossible_models_are_named() {
        assert_eq!(Layout::new(&[], 1), Err(LayoutError::Empty));
        assert_eq!(Layout::new(&[tensor(&[0])], 1), Err(LayoutError::Empty));
        let huge = Layout::new(&[tensor(&[u64::MAX, 3])], 1).expect_err("too large").to_string();
        assert!(huge.contains("tensor w"), "{huge}");
        let most = (MOST_BLOCKS * BLOCK_ELEMENTS) as u64;
        let layout = Layout::new(&[tensor(&[3, most])], 3).expect("as many as three servers hold");
        assert_eq!(layout.owned_by(0).count(), MOST_BLOCKS);
        let more = Layout::new(&[tensor(&[1]), tensor(&[3, most])], 3).expect_err("one more").to_string();
        assert!(more.contains("servers (3) hold") && more.contains("more servers"), "{more}");
    }

    proptest! {
        #[test]
        fn every_element_is_in_one_block_of_one_server(n in 1_u64..3_000_000, servers in 1_usize..20) {
            let layout = Layout::new(&[tensor(&[n])], servers).expect("fits");
            let mut next = 0;
            for block in 0..layout.blocks() {
                let range = layout.range(block);
                prop_assert_eq!(range.start, next);
                prop_assert!(!range.is_empty());
                next = range.end;
            }
            prop_assert_eq!(next, n as usize);
            let dealt: usize = (0..servers as u32).map(|s| layout.owned_by(s).count()).sum();
            prop_assert_eq!(dealt, layout.blocks() as usize);
            for server in 0..servers as u32 {
                prop_assert!(layout.owned_by(server).all(|b| layout.owner(b) == server));
            }
        }

        #[test]
        fn connections_carry_as_much_as_each_other(n in 1_u64..9_000_000, servers in 1_usize..4, lanes in 1_u32..17) {
            let layout = Layout::new(&[tensor(&[n])], servers).expect("fits");
            for server in 0..servers as u32 {
                let mut bytes = vec![0; lanes as usize];
                layout.owned_by(server).for_each(|b| bytes[layout.lane(b, lanes) as usize] += layout.range(b).len());
                let (least, most) = (bytes.iter().min(), bytes.iter().max());
                prop_assert!(most.expect("lanes") - least.expect("lanes") <= layout.block_elements());
            }
        }
    }
}
