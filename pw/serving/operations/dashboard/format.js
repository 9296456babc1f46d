// Numbers as people read them.

/** Bytes in the largest binary unit that keeps them above 1. */
export function bytes(number) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(number) < 1024) return `${unit === "B" ? number : number.toPrecision(3)} ${unit}`;
    number /= 1024;
  }
  return `${number.toPrecision(3)} TiB`;
}

/** 1234567 -> "1,234,567"; fractions with so many digits. */
export function count(number, digits = 0) {
  return number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A rate: whole numbers, below ten with one digit. */
export function rate(number) {
  return count(number, number > 0 && number < 10 ? 1 : 0);
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** Seconds as "340 ms", "12.3 s", "4 min", "2 h". */
export function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 1) return `${Math.round(1000 * number)} ms`;
  if (number < 60) return `${number.toFixed(1)} s`;
  return number < 5400 ? `${Math.round(number / 60)} min` : `${Math.round(number / 3600)} h`;
}
