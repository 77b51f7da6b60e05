// Show the values at the step under the pointer, else the last ones.
const charts = JSON.parse(document.getElementById("curves").textContent);
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const svg = figure.querySelector("svg"), output = figure.querySelector("output"), last = [...output.childNodes];
  const cursor = svg.querySelector(".cursor"), [low, high] = svg.dataset.x.split(" ").map(Number);
  const { left, right, top, bottom, width } = charts.area, curves = charts.curves[figure.dataset.chart];
  const nearest = (curve, step) => curve.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = Math.min(Math.max(((event.clientX - box.left) / box.width) * width, left), right);
    const step = low + ((x - left) / (right - left)) * (high - low);
    const found = curves.map((curve) => curve && nearest(curve, step));
    const at = nearest(found.filter(Boolean), step)[0];
    const place = left + ((at - low) / (high - low)) * (right - left);
    cursor.setAttribute("d", `M${place} ${top}V${bottom}`);
    output.textContent = `step ${at.toLocaleString("en")}`;
    found.forEach((point, number) => {
      if (!point) return;
      const value = document.createElement("span");
      value.className = `c${number % charts.colors}`;
      const prefix = found.length > 1 ? `${number + 1}: ` : "";
      value.textContent = prefix + (point[1] === null ? "not finite" : Number(point[1].toPrecision(4)));
      output.append(value);
    });
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("d", "");
    output.replaceChildren(...last);
  });
}
