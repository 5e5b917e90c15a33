//! Writes the series of all sources to their event files.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::event_file::{self, Point, put_beginning, put_point, put_restart};
use super::{LONGEST_NAME, MOST_METRICS, Source};
use crate::checkpoint::Folder;
use crate::checkpoint::disk::{OpenFile, names, read};

/// The beginning of the name of an event file, by which TensorBoard knows it. The time follows, because TensorBoard reads the
/// files of a folder in the order of their names.
const PREFIX: &str = "events.out.tfevents.";

/// Length of a file after which another one follows, on a disk that writes files anew to let them grow.
const LONGEST_REWRITTEN: u64 = 256 << 10;

/// The next piece of a source's series.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// Values at a step.
    Point(Point),
    /// The source goes back: its points above this step are discarded.
    Rewind(u64),
}

/// The event files of a job.
#[derive(Debug)]
pub struct SeriesWriter {
    folder: Folder,
    /// Distinguishes the files of this process.
    process: String,
    sources: BTreeMap<Source, Series>,
}

/// The series of one source.
#[derive(Debug, Default)]
struct Series {
    /// The last step of each metric.
    last: BTreeMap<String, u64>,
    /// The file that is written to, once there is something to write.
    file: Option<Growing>,
}

/// A file that grows.
#[derive(Debug)]
struct Growing {
    file: Box<dyn OpenFile>,
    length: u64,
    /// It has bytes that are not durable.
    dirty: bool,
}

impl SeriesWriter {
    /// Describes the series in `folder`, which need not exist yet. `process` distinguishes the files of this process from those
    /// of others.
    #[must_use]
    pub fn new(folder: Folder, process: u64) -> Self {
        Self { folder, process: format!("{process:016x}"), sources: BTreeMap::new() }
    }

    /// Appends `entries` to the series of `source`. After an error they can be appended once more: what is there already is
    /// left out.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn append(&mut self, source: Source, entries: &[Entry]) -> io::Result<()> {
        let Self { folder, process, sources } = self;
        let folder = folder.folder(&source.to_string());
        let series = match sources.entry(source) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => place.insert(Series::open(&folder)?),
        };
        let mut rest = entries;
        while !rest.is_empty() {
            let points = rest.iter().position(|entry| matches!(entry, Entry::Rewind(_))).unwrap_or(rest.len());
            series.put(&folder, process, &rest[..points])?;
            let Some(Entry::Rewind(step)) = rest.get(points) else { break };
            series.rewind(&folder, process, *step)?;
            rest = &rest[points + 1..];
        }
        Ok(())
    }

    /// Makes what was appended durable.
    ///
    /// # Errors
    /// If a file cannot be flushed.
    pub fn flush(&mut self) -> io::Result<()> {
        self.sources.values_mut().filter_map(|series| series.file.as_mut()).try_for_each(Growing::flush)
    }
}

impl Series {
    /// Reads how far the series in `folder` has come, and makes that durable: the process that wrote it may have died before it
    /// did, and points that are there already are not written again.
    fn open(folder: &Folder) -> io::Result<Self> {
        let (mut series, files) = (Self::default(), event_files(folder)?);
        if !folder.disk().grows_by_rewriting() && !files.is_empty() {
            files.iter().try_for_each(|name| folder.disk().open(&folder.join(name))?.flush())?;
            flush_names(folder)?;
        }
        for point in read_points(folder)? {
            series.last.extend(point.values.into_keys().map(|name| (name, point.step)));
        }
        Ok(series)
    }

    fn put(&mut self, folder: &Folder, process: &str, entries: &[Entry]) -> io::Result<()> {
        let (mut bytes, mut last) = (Vec::new(), self.last.clone());
        for entry in entries {
            let Entry::Point(point) = entry else { continue };
            let mut values = BTreeMap::new();
            for (name, value) in &point.values {
                let follows = match last.get(name) {
                    Some(last) => *last < point.step,
                    None => name.len() <= LONGEST_NAME && last.len() < MOST_METRICS,
                };
                if follows {
                    last.insert(name.clone(), point.step);
                    values.insert(name.clone(), *value);
                }
            }
            if !values.is_empty() {
                put_point(&mut bytes, &Point { values, ..point.clone() });
            }
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let is_full = |file: &Growing| folder.disk().grows_by_rewriting() && file.length >= LONGEST_REWRITTEN;
        if let Some(full) = self.file.as_mut().filter(|file| is_full(file)) {
            full.flush()?;
            self.file = None;
        }
        let growing = match &mut self.file {
            Some(growing) => growing,
            file => file.insert(begin(folder, process, None)?),
        };
        growing.put(&bytes)?;
        self.last = last;
        Ok(())
    }

    /// Discards the points above `step`: the next file says so. The files before stay, because a TensorBoard that reads one of
    /// them would not go on to the next if it were gone.
    fn rewind(&mut self, folder: &Folder, process: &str, step: u64) -> io::Result<()> {
        if self.last.values().any(|last| *last > step) {
            // Nothing flushes it later.
            self.file.as_mut().map_or(Ok(()), Growing::flush)?;
            self.file = Some(begin(folder, process, Some(step + 1))?);
            self.last.values_mut().for_each(|last| *last = step.min(*last));
        }
        Ok(())
    }
}

impl Growing {
    /// Appends `bytes`. After an error the next ones take their place.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_at(bytes, self.length)?;
        self.length += bytes.len() as u64;
        self.dirty = true;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.dirty {
            self.file.flush()?;
            self.dirty = false;
        }
        Ok(())
    }
}

/// Begins a file that comes after those in `folder`. From the step `discarded` on, if there is one, readers forget what they
/// have read of those.
fn begin(folder: &Folder, process: &str, discarded: Option<u64>) -> io::Result<Growing> {
    let disk = folder.disk();
    disk.create_folders(folder)?;
    let newest = event_files(folder)?.iter().filter_map(|name| time_of(name)).max();
    let now = disk.now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The clock may have gone back since.
    let time = newest.map_or(now.as_secs(), |newest| now.as_secs().max(newest + 1));
    let file = disk.create(&folder.join(format!("{PREFIX}{time:010}.{process}")))?;
    flush_names(folder)?;
    let mut bytes = Vec::new();
    put_beginning(&mut bytes, now.as_secs_f64());
    if let Some(step) = discarded {
        put_restart(&mut bytes, now.as_secs_f64(), step);
    }
    let mut growing = Growing { file, length: 0, dirty: false };
    growing.put(&bytes)?;
    Ok(growing)
}

/// Makes the names in the folder of a source durable, its own name, and that of the folder with all sources.
fn flush_names(folder: &Folder) -> io::Result<()> {
    let folders = folder.ancestors().filter(|path| !path.as_os_str().is_empty());
    for (above, path) in folders.take(3).enumerate() {
        match folder.disk().flush_folder(path) {
            // The last one may be another user's, who has made the folder with all sources.
            Err(error) if above == 2 && error.kind() == io::ErrorKind::PermissionDenied => {}
            flushed => flushed?,
        }
    }
    Ok(())
}

/// Returns the time in the name of an event file.
fn time_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}

/// Returns the names of the event files in `folder`, in order.
pub(super) fn event_files(folder: &Folder) -> io::Result<Vec<String>> {
    let names = names(folder.disk(), folder)?.into_iter().filter_map(|name| name.into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.starts_with(PREFIX)).collect();
    names.sort_unstable();
    Ok(names)
}

/// Returns the points of a source's folder, in the order in which they were written.
///
/// # Errors
/// If a file cannot be read.
pub fn read_points(folder: &Folder) -> io::Result<Vec<Point>> {
    let mut found = Vec::new();
    for name in event_files(folder)? {
        let path: &Path = &folder.join(name);
        event_file::read(&read(folder.disk(), path)?.unwrap_or_default(), &mut found);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn point(step: u64, values: &[(&str, f32)]) -> Entry {
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Entry::Point(Point { step, unix_seconds: 1.5, values })
    }

    fn losses(steps: impl IntoIterator<Item = u64>) -> Vec<Entry> {
        steps.into_iter().map(|step| point(step, &[("loss", step as f32)])).collect()
    }

    fn steps(folder: &Folder) -> Vec<u64> {
        read_points(folder).expect("readable").iter().map(|point| point.step).collect()
    }

    /// The writer of a process in `folder`, and the folder of trainer 3.
    fn process(folder: &Path, number: u64) -> (SeriesWriter, Folder) {
        let folder = Folder::from(folder);
        let trainer = folder.folder("trainer-3");
        (SeriesWriter::new(folder, number), trainer)
    }

    const SOURCE: Source = Source::Trainer(3);

    #[test]
    fn each_metric_has_one_value_at_a_step() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (mut writer, folder) = process(scratch.path(), 1);
        let sent = [
            point(1, &[("loss", 4.0)]),
            point(2, &[("loss", f32::NAN), ("accuracy", 0.5)]),
            point(2, &[("loss", 9.0), ("perplexity", 7.0)]),
            point(1, &[("loss", 9.0)]),
            point(4, &[("loss", -0.0)]),
        ];
        writer.append(SOURCE, &sent).expect("written");
        // Points that are sent again are left out, by the next process, too.
        writer.append(SOURCE, &sent).expect("written");
        process(scratch.path(), 2).0.append(SOURCE, &sent).expect("written");
        let found = read_points(&folder).expect("readable");
        let found: Vec<_> = found.iter().map(|point| (point.step, format!("{:?}", point.values))).collect();
        let want = [
            (1, r#"{"loss": 4.0}"#),
            (2, r#"{"accuracy": 0.5, "loss": NaN}"#),
            (2, r#"{"perplexity": 7.0}"#),
            (4, r#"{"loss": -0.0}"#),
        ];
        assert_eq!(found, want.map(|(step, values)| (step, values.to_owned())));
    }

    #[test]
    fn a_source_that_goes_back_makes_its_steps_again() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (mut first, folder) = process(scratch.path(), 1);
        first.append(SOURCE, &losses(1..6)).expect("written");
        // A rewind and what follows arrive together, as after a heartbeat that was lost.
        let mut entries = losses(4..6);
        entries.extend([Entry::Rewind(3)].into_iter().chain(losses(4..5)));
        first.append(SOURCE, &entries).expect("written");
        assert_eq!(steps(&folder), [1, 2, 3, 4]);
        // A process that is started anew gets them again.
        let (mut second, _) = process(scratch.path(), 2);
        second.append(SOURCE, &entries).expect("written");
        second.append(SOURCE, &losses(5..7)).expect("written");
        assert_eq!(steps(&folder), [1, 2, 3, 4, 5, 6]);
        // To go back to where it is changes nothing, to the beginning all.
        second.append(SOURCE, &[Entry::Rewind(6)]).expect("written");
        assert_eq!(steps(&folder), [1, 2, 3, 4, 5, 6]);
        second.append(SOURCE, &[Entry::Rewind(0)]).expect("written");
        second.append(SOURCE, &losses(1..2)).expect("written");
        assert_eq!(steps(&folder), [1]);
        second.flush().expect("durable");
    }

    #[test]
    fn after_a_torn_record_a_new_process_goes_on() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (mut first, folder) = process(scratch.path(), 1);
        first.append(SOURCE, &losses(1..4)).expect("written");
        let name = event_files(&folder).expect("readable").remove(0);
        let bytes = fs::read(folder.join(&name)).expect("readable");
        fs::write(folder.join(&name), &bytes[..bytes.len() - 5]).expect("writable");
        let (mut second, _) = process(scratch.path(), 2);
        // The trainer holds what was not durable.
        second.append(SOURCE, &losses(2..6)).expect("written");
        assert_eq!(steps(&folder), [1, 2, 3, 4, 5]);
        let names = event_files(&folder).expect("readable");
        assert!(names.len() == 2 && names[0] == name, "TensorBoard reads the older file first: {names:?}");
    }

    #[test]
    fn a_source_has_so_many_metrics_and_no_more() {
        let scratch = tempfile::tempdir().expect("a folder");
        let (mut writer, folder) = process(scratch.path(), 1);
        let values = (0..MOST_METRICS + 1).map(|n| (format!("m{n:02}"), 0.0)).collect();
        let long = [("n".repeat(LONGEST_NAME + 1), 0.0)].into();
        let entries = [long, values].map(|values| Entry::Point(Point { step: 1, unix_seconds: 0.0, values }));
        writer.append(SOURCE, &entries).expect("written");
        writer.append(SOURCE, &[point(2, &[("m32", 1.0), ("m31", 2.0)])]).expect("written");
        let found = read_points(&folder).expect("readable");
        assert_eq!(found.iter().map(|point| point.values.len()).collect::<Vec<_>>(), [MOST_METRICS, 1]);
    }
}
