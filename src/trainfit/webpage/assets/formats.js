// Numbers as people read them, the same as in the terminal.

const BINARY_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

function formatBytes(size) {
  const magnitude = Math.abs(size);
  if (magnitude < 1024) return `${Math.round(size)} B`;
  let power = 1;
  while (power < BINARY_UNITS.length - 1 && magnitude >= (1024 - 0.005) * 1024 ** power) power += 1;
  return `${(size / 1024 ** power).toFixed(2)} ${BINARY_UNITS[power]}`;
}

function threeDigits(value) {
  if (value === 0) return "0";
  if (value < 9.995) return value.toFixed(2);
  return value < 99.95 ? value.toFixed(1) : value.toFixed(0);
}

function formatSeconds(seconds) {
  if (seconds < 0) return `-${formatSeconds(-seconds)}`;
  if (seconds * 1e6 < 999.5) return `${threeDigits(seconds * 1e6)} µs`;
  if (seconds * 1e3 < 999.5) return `${threeDigits(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${threeDigits(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

const formatCount = (count) => Math.round(count).toLocaleString("en-US");
const formatShare = (share) => `${(100 * share).toFixed(1)}%`;
const formatAdded = (share) => (share === 0 ? "0%" : `${share < 0 ? "-" : "+"}${Math.abs(100 * share).toFixed(1)}%`);

// Counts of operations: 369 T instead of fifteen digits.
function formatLarge(count) {
  const signs = ["", "k", "M", "G", "T", "P", "E"];
  const power = count < 1000 ? 0 : Math.min(Math.floor(Math.log10(count) / 3), signs.length - 1);
  return power ? `${threeDigits(count / 1000 ** power)} ${signs[power]}` : String(count);
}

// An amount without a currency: two decimals, or three digits where that is too few.
function formatMoney(amount) {
  if (amount === 0 || amount >= 0.995) return Number(amount.toFixed(2)).toLocaleString("en-US", { minimumFractionDigits: 2 });
  return String(Number(amount.toPrecision(3)));
}

// Enough digits to show that it is not zero.
const notNothing = (percent) => (percent >= 0.01 ? percent.toFixed(2) : percent.toExponential(0));

// A change always has its sign.
const formatChange = (change, format) => (change ? `${change < 0 ? "-" : "+"}${format(Math.abs(change))}` : "–");

const FORMATS = {
  text: String,
  bytes: formatBytes,
  seconds: formatSeconds,
  count: formatCount,
  share: formatShare,
  added: formatAdded,
  error: (share) => (share === 0 ? "exact" : `${share < 0 ? "-" : "+"}${notNothing(Math.abs(100 * share))}%`),
  large: formatLarge,
  money: formatMoney,
  figure: String, // already written
  bytes_change: (size) => formatChange(size, formatBytes),
  seconds_change: (seconds) => formatChange(seconds, formatSeconds),
};

// Steps between the marks of an axis: about `many` of them, at round numbers of the unit that suits the largest.
function byteMarks(largest, many) {
  if (!(largest > 0)) return [0];
  const unit = 1024 ** Math.min(Math.floor(Math.log2(largest) / 10), 5);
  return roundMarks(0, largest, many, unit);
}

function roundMarks(from, to, many, unit) {
  const rough = (to - from) / unit / many;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ten * ([1, 2, 5].find((factor) => factor * ten >= rough) || 10);
  const found = [];
  for (let mark = Math.ceil(from / step) * step; mark <= to + step * 1e-9; mark += step) found.push(mark);
  return found;
}

function formatMark(size) {
  return size === 0 ? "0" : formatBytes(size).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");
}
